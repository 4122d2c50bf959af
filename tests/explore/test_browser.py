"""The page in a real browser: chromium of the system, steered by playwright. Skipped where one of them is missing."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from uniquery.masks import rle

from .in_browser import CHROMIUM, Server, drawn_tiles, first_image, wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


def test_open_filter_and_sort(server, tab):
    tab.goto(server.address)
    assert drawn_tiles(tab).count() == 4
    wait_until(tab, "document.querySelector('.tile .sub').textContent.includes('AP')")
    names = tab.locator(".tile span:not(.sub)").all_text_contents()
    tab.keyboard.press("/")
    tab.keyboard.type(names[2].rpartition("/")[2])
    wait_until(tab, "document.querySelector('.count').textContent.startsWith('1 of 4')")
    tab.fill("#search", "")
    wait_until(tab, "document.querySelector('.count').textContent.startsWith('4 of 4')")
    tab.get_by_label("By", exact=True).select_option("instances")
    tab.get_by_label("Largest first").check()
    counts = [int(text.split()[0]) for text in tab.locator(".tile .sub").all_text_contents()]
    assert counts == sorted(counts, reverse=True)
    tab.get_by_label("Kind of error").select_option("missed")
    assert "instances: none of these" in tab.locator("#kind-meaning").text_content()
    tab.get_by_label("By", exact=True).select_option("difference1")
    tab.get_by_label("Predictions of").select_option("1")
    assert tab.locator(".tile").count() >= 1


def canvas_content(page, selector):
    return page.eval_on_selector(selector, "canvas => canvas.toDataURL()")


def test_sliders_and_toggles_act_at_once(server, tab):
    tab.goto(server.address)
    drawn_tiles(tab)
    requests = []
    tab.on("request", lambda request: requests.append(request.url) if "/api/state" not in request.url else None)
    tab.wait_for_timeout(300)
    requests.clear()
    shown = [canvas_content(tab, ".tile canvas")]
    tab.get_by_label("Score at least").fill("0.05")
    wait_until(tab, "before => document.querySelector('.tile canvas').toDataURL() !== before", shown[0])
    assert [url for url in requests if "masks" in url or "images" in url] == []
    shown.append(canvas_content(tab, ".tile canvas"))
    tab.get_by_label("Ground truth").uncheck()
    wait_until(tab, "before => document.querySelector('.tile canvas').toDataURL() !== before", shown[1])
    shown.append(canvas_content(tab, ".tile canvas"))
    tab.get_by_label("Mask threshold").fill("1")
    wait_until(tab, "before => document.querySelector('.tile canvas').toDataURL() !== before", shown[2])


def test_keyboard_reaches_an_image_and_its_query(server, tab):
    tab.goto(server.address)
    drawn_tiles(tab).first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/#image/*")
    tab.wait_for_selector(".instances button")
    tab.keyboard.press("ArrowLeft")
    wait_until(tab, "document.querySelector('.bar .note').textContent.includes('1 of 4')")
    tab.keyboard.press("?")
    assert tab.locator("dialog[open] h2").text_content() == "Keyboard"
    tab.keyboard.press("Escape")
    tab.locator(".instances button", has_text="truth").first.focus()
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/#query/**")
    wait_until(tab, "document.querySelectorAll('.panel[data-loaded]').length === 2")
    wait_until(tab, "document.body.textContent.includes('of 3 searched')")
    tab.keyboard.press("Escape")
    tab.wait_for_url("**/#image/*")
    tab.keyboard.press("Escape")
    wait_until(tab, "document.activeElement.classList.contains('tile')")


def test_click_on_an_instance(server, tab):
    tab.goto(server.address + "#image/" + str(first_image(server, tab)))
    tab.wait_for_selector(".instances button")
    tab.get_by_label("Predictions", exact=True).uncheck()
    point = tab.evaluate("""async () => {
        const id = location.hash.split('/')[1];
        const masks = (await (await fetch(`api/masks?images=${id}`)).json())[id];
        const { paintIds } = await import('./static/masks.js');
        const start = await (await fetch('api/start')).json();
        const [height, width] = start.images.size[start.images.id.indexOf(Number(id))];
        const ids = paintIds(masks.truth.map((row, i) => [i, row[1]]), { height, width }, { height, width });
        const position = ids.indexOf(2);
        return [(position % width + 0.5) / width, (Math.floor(position / width) + 0.5) / height];
    }""")
    box = tab.locator("canvas.clickable").first.bounding_box()
    tab.mouse.click(box["x"] + point[0] * box["width"], box["y"] + point[1] * box["height"])
    tab.wait_for_url("**/#query/*/truth/1")


def test_masks_are_decoded_as_the_library_does(server, tab):
    tab.goto(server.address)
    rng = np.random.default_rng(0)
    bitmaps = [rng.integers(0, 2, (9, 7)), np.zeros((5, 4)), np.ones((3, 8)), rng.random((200, 150)) > 0.97]
    for bitmap in bitmaps:
        height, width = bitmap.shape
        ids = tab.evaluate(
            """async ([counts, height, width]) => {
                const { paintIds } = await import('./static/masks.js');
                return [...paintIds([[0, counts]], { height, width }, { height, width })];
            }""",
            [rle.encode(bitmap)["counts"], height, width],
        )
        assert np.array_equal(np.array(ids).reshape(height, width), bitmap)


def test_try_a_picture(server, tab, scenes, tmp_path):
    tab.goto(server.address + "#try")
    photo = next(scenes.images("val").iterdir())
    tab.set_input_files("#try-file", str(photo))
    tab.wait_for_selector(".panel:not([hidden]) a[download]")
    tab.get_by_label("Score at least").fill("0.05")
    before = canvas_content(tab, ".panel canvas")
    tab.get_by_label("Mask threshold").fill("1")
    wait_until(tab, "before => document.querySelector('.panel canvas').toDataURL() !== before", before)
    with tab.expect_download() as found:
        tab.get_by_role("link", name="label PNG").click()
    assert Image.open(found.value.path()).size == (64, 64)
    with tab.expect_download() as found:
        tab.get_by_role("link", name="COCO json").click()
    assert isinstance(json.loads(Path(found.value.path()).read_text()), list)
    drop(tab, photo.read_bytes(), "dropped.png")
    wait_until(tab, "document.querySelector('[role=status].note').textContent.includes('instances')")
    drop(tab, b"no image", "evil.png")
    wait_until(tab, "document.querySelector('[role=status].note').textContent.includes('no picture')")


def drop(tab, content, name):
    tab.evaluate(
        """([bytes, name]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], name));
            const event = new DragEvent('drop', { dataTransfer: transfer, bubbles: true });
            document.querySelector('.drop').dispatchEvent(event);
        }""",
        [list(content), name],
    )


def test_equivariance(server, tab):
    tab.goto(server.address + "#equivariance")
    tab.wait_for_selector("#equivariance-summary")
    before = tab.locator("#equivariance-summary").text_content()
    tab.get_by_label("Rotation").fill("40")
    wait_until(tab, "t => document.querySelector('#equivariance-summary').textContent !== t", before)


def test_a_run_that_trains_and_is_deleted(browser, tab, runs):
    config, metrics = runs / "ours" / "config.yaml", runs / "ours" / "metrics.jsonl"
    config.write_text(config.read_text().replace("  steps: 2\n", "  steps: 10\n"))
    os.utime(metrics)
    server = Server(runs / "ours")
    try:
        tab.goto(server.address + "#training")
        wait_until(tab, "document.querySelector('.training-status')?.textContent.includes('step 2 of 10')")
        assert "left" in tab.locator(".training-status").text_content()
        line = json.loads(next(line for line in metrics.read_text().splitlines() if '"train"' in line))
        with metrics.open("a") as file:
            file.write(json.dumps(line | {"step": 7, "images": 14}) + "\n")
        wait_until(tab, "document.querySelector('.training-status')?.textContent.includes('step 7 of 10')")
        shutil.rmtree(runs / "ours")
        wait_until(tab, "document.querySelector('#messages').textContent.includes('is gone')")
    finally:
        server.stop()
    wait_until(tab, "document.querySelector('#messages').textContent.includes('does not answer')")


def test_ten_thousand_images(browser, tab, tmp_path):
    """Only the tiles in sight exist; names with HTML in them are text; only data, without a run."""
    images, name = tmp_path / "images", "<img src=x onerror=document.title=1>.jpg"
    images.mkdir()
    for number in range(20):
        Image.new("RGB", (32, 24), (number * 10, 90, 120)).save(images / (f"{number}.jpg" if number else name))
    rows = [
        {"id": i, "file_name": f"{i % 20}.jpg" if i % 20 else name, "height": 24, "width": 32} for i in range(10_000)
    ]
    square = {"iscrowd": 0, "category_id": 1, "area": 64, "bbox": [4, 4, 8, 8]}
    polygons = [[4, 4, 12, 4, 12, 12, 4, 12]]
    annotations = [{"id": i + 1, "image_id": i, "segmentation": polygons, **square} for i in range(10_000)]
    categories = [{"id": 1, "name": "<b>cell</b>"}]
    file = tmp_path / "many.json"
    file.write_text(json.dumps({"images": rows, "annotations": annotations, "categories": categories}))
    server = Server("--data", file, images)
    try:
        tab.goto(server.address)
        assert drawn_tiles(tab).count() < 100
        tab.eval_on_selector(".grid", "grid => { grid.scrollTop = grid.scrollHeight; }")
        wait_until(tab, "[...document.querySelectorAll('.tile span')].at(-2).textContent === '19.jpg'")
        assert tab.locator(".tile").count() < 100
        tab.eval_on_selector(".grid", "grid => { grid.scrollTop = 0; }")
        wait_until(tab, "document.querySelector('.tile span').textContent.startsWith('<img')")
        assert "<b>cell</b>" in tab.get_by_label("Class").locator("option").all_text_contents()
        tab.goto(server.address + "#image/0")
        wait_until(tab, "document.querySelector('.instances li')?.textContent.includes('<b>cell</b>')")
        assert tab.locator("main h2").text_content() == name
        assert tab.locator("main img, main b").count() == 0
        assert tab.title() == "uniquery explore"
        assert tab.locator("#tabs a").count() == 1  # nothing to try or to follow without a run
    finally:
        server.stop()

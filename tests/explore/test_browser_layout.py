"""The page is usable by everybody: with a keyboard or a screen reader, in the dark, on a phone."""

import pytest

from .in_browser import CHROMIUM, first_image

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


READY = {
    "": ".tile[data-drawn]",
    "#image": ".instances li",
    "#query": ".panel[data-loaded]",
    "#try": ".drop",
    "#equivariance": "#equivariance-summary",
    "#training": ".training-status",
}
"""What is there when a view is complete."""
VIEWS = ["", "#image/{0}", "#query/{0}/truth/0", "#try", "#equivariance", "#training"]


@pytest.mark.parametrize(("scheme", "options"), [("light", {}), ("dark", {"runOnly": ["color-contrast"]})])
def test_accessible(server, browser, scheme, options):
    """All rules of axe-core, and once more those that depend on the colors."""
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    context = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(server.address)
    serious = []
    for view in VIEWS:
        page.evaluate("view => { location.hash = view || '#gallery'; }", view.format(first_image(server, page)))
        page.wait_for_selector(READY[view.partition("/")[0]])
        found = axe.Axe().run(page, options=options)["violations"]
        serious += [
            (view, one["id"], one["nodes"][0]["html"][:120])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
    context.close()
    assert serious == []


def test_nothing_is_wider_than_a_phone(server, browser):
    context = browser.new_context(viewport={"width": 375, "height": 700})
    page = context.new_page()
    page.goto(server.address)
    for view in VIEWS:
        page.evaluate("view => { location.hash = view || '#gallery'; }", view.format(first_image(server, page)))
        page.wait_for_selector(READY[view.partition("/")[0]])
        for element in ("document.documentElement", "document.querySelector('main')"):
            assert page.evaluate(f"{element}.scrollWidth") <= 375, view
    context.close()

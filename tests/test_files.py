"""Atomic writes, and errors in one sentence."""

import errno
import os
from pathlib import Path

import pytest

from helpers.coco_files import assert_one_sentence
from uniquery import files
from uniquery.errors import CheckpointError, ConfigError, DataError, UserError, did_you_mean
from uniquery.files import make_folder, replace_folder, restore_folder, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse(*_args, **_more):
    raise OSError(errno.EACCES, "Permission denied")


class TestWriteAtomically:
    @pytest.mark.parametrize(("content", "data"), [("Größe\n", "Größe\n".encode()), (b"\0\xff", b"\0\xff"), ("", b"")])
    def test_writes_text_and_bytes(self, tmp_path, content, data):
        write_atomically(tmp_path / "a.txt", content)
        assert (tmp_path / "a.txt").read_bytes() == data
        assert names(tmp_path) == ["a.txt"]

    def test_replaces(self, tmp_path):
        for content in ("old and longer", "new"):
            write_atomically(tmp_path / "a.txt", content)
        assert (tmp_path / "a.txt").read_text() == "new"

    def test_a_reader_that_has_it_open_keeps_the_old_content(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("old")
        with path.open() as reader:
            write_atomically(path, "new")
            assert reader.read() == "old"

    @pytest.mark.parametrize("broken", ["fsync", "replace"])
    def test_failure_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch, broken):
        path = tmp_path / "a.txt"
        path.write_text("old")
        monkeypatch.setattr(os if broken == "fsync" else Path, broken, refuse)
        with pytest.raises(UserError) as caught:
            write_atomically(path, "new")
        assert_one_sentence(caught.value)
        assert str(path) in str(caught.value)
        assert "Permission denied" in str(caught.value)
        assert path.read_text() == "old"
        assert names(tmp_path) == ["a.txt"]

    def test_interruption_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch):
        def interrupt(_descriptor):
            raise KeyboardInterrupt

        path = tmp_path / "a.txt"
        path.write_text("old")
        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, "new")
        assert path.read_text() == "old"
        assert names(tmp_path) == ["a.txt"]

    def test_places_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file" / "a.txt", tmp_path / "nowhere" / "a.txt", tmp_path / ("a" * 300), tmp_path):
            with pytest.raises(UserError) as caught:
                write_atomically(path, "new")
            assert_one_sentence(caught.value)
            assert str(path) in str(caught.value)
        assert names(tmp_path) == ["file"]


class TestMakeFolder:
    def test_makes_parents_and_accepts_an_existing_folder(self, tmp_path):
        assert make_folder(tmp_path / "a" / "b") == make_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
        assert (tmp_path / "a" / "b").is_dir()

    def test_refuses_below_and_instead_of_a_file(self, tmp_path):
        (tmp_path / "file").write_text("kept")
        for path in (tmp_path / "file", tmp_path / "file" / "a"):
            with pytest.raises(UserError, match="Cannot create the folder") as caught:
                make_folder(path)
            assert_one_sentence(caught.value)
        assert (tmp_path / "file").read_text() == "kept"


class TestReplaceFolder:
    @pytest.fixture
    def old(self, tmp_path):
        folder = tmp_path / "last"
        folder.mkdir()
        (folder / "model").write_text("old")
        (folder / "extra").write_text("old")
        return folder

    def test_makes_a_new_one(self, tmp_path):
        with replace_folder(tmp_path / "runs" / "last") as temporary:
            (temporary / "model").write_text("new")
            assert not (tmp_path / "runs" / "last").exists()
        assert names(tmp_path / "runs") == ["last"]
        assert (tmp_path / "runs" / "last" / "model").read_text() == "new"

    def test_replaces_as_a_whole(self, old):
        with replace_folder(old) as temporary:
            (temporary / "model").write_text("new")
            (temporary / "sub").mkdir()
            (temporary / "sub" / "deep").write_text("new")
            assert (old / "model").read_text() == "old"
        assert names(old) == ["model", "sub"]
        assert names(old.parent) == ["last"]

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), UserError("Something else is wrong.")])
    def test_an_error_in_the_block_keeps_the_old_folder(self, old, error):
        def write() -> None:
            with replace_folder(old) as temporary:
                (temporary / "model").write_text("new")
                raise error

        with pytest.raises(type(error)) as caught:
            write()
        assert caught.value is error
        assert (old / "model").read_text() == "old"
        assert names(old.parent) == ["last"]

    def test_a_full_disk_in_the_block_is_a_user_error(self, old):
        with pytest.raises(UserError, match="No space left") as caught, replace_folder(old):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert_one_sentence(caught.value)
        assert names(old) == ["extra", "model"]
        assert names(old.parent) == ["last"]

    def test_a_failing_flush_keeps_the_old_folder(self, old, monkeypatch):
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(UserError, match="Permission denied"), replace_folder(old) as temporary:
            (temporary / "model").write_text("new")
        assert (old / "model").read_text() == "old"
        assert names(old.parent) == ["last"]

    @pytest.mark.parametrize("which", [1, 2], ids=["the old away", "the new in"])
    def test_a_failing_rename_keeps_the_old_folder(self, old, monkeypatch, which):
        rename, calls = Path.rename, []

        def fail_once(self, target):
            calls.append(target)
            return refuse() if len(calls) == which else rename(self, target)

        monkeypatch.setattr(Path, "rename", fail_once)
        with pytest.raises(UserError, match="Permission denied"), replace_folder(old) as temporary:
            (temporary / "model").write_text("new")
        assert (old / "model").read_text() == "old"
        assert names(old.parent) == ["last"]

    def test_leftovers_of_a_killed_process_do_not_matter(self, old):
        for leftover in (".last.new", ".last.old"):
            (old.parent / leftover).mkdir()
            (old.parent / leftover / "stale").write_text("")
        with replace_folder(old) as temporary:
            assert names(temporary) == []
            (temporary / "model").write_text("new")
        assert names(old) == ["model"]
        assert names(old.parent) == ["last"]

    def test_killed_between_the_renames_the_old_folder_comes_back(self, old):
        old.rename(old.parent / ".last.old")
        restore_folder(old)
        assert (old / "model").read_text() == "old"
        old.rename(old.parent / ".last.old")
        with pytest.raises(ValueError, match="x"), replace_folder(old):
            raise ValueError("x")
        assert (old / "model").read_text() == "old"
        assert names(old.parent) == ["last"]

    def test_recovery_never_touches_a_folder_that_is_there(self, old):
        (old.parent / ".last.old").mkdir()
        restore_folder(old)
        assert names(old) == ["extra", "model"]
        restore_folder(old.parent / "nothing")
        assert not (old.parent / "nothing").exists()

    def test_a_place_below_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError) as caught, replace_folder(tmp_path / "file" / "last"):
            pytest.fail("the block must not run")
        assert_one_sentence(caught.value)

    def test_every_file_is_flushed_before_the_rename(self, old, monkeypatch):
        flushed = []
        monkeypatch.setattr(files, "_fsync", lambda path: flushed.append((path.name, (old / "extra").exists())))
        with replace_folder(old) as temporary:
            (temporary / "sub").mkdir()
            (temporary / "sub" / "deep").write_text("new")
        assert dict(flushed[:-1]) == {"sub": True, "deep": True, ".last.new": True}
        assert flushed[-1] == (old.parent.name, False)  # the exchange itself


class TestErrors:
    def test_all_are_user_errors(self):
        assert all(issubclass(kind, UserError) for kind in (ConfigError, DataError, CheckpointError))

    @pytest.mark.parametrize(
        ("word", "known", "suggestion"),
        [
            ("cel", ["debris", "cell"], " Did you mean 'cell'?"),
            ("CELL", ["debris", "cell"], " Did you mean 'cell'?"),
            ("zebra", ["debris", "cell"], ""),
            ("cell", [], ""),
            ("", ["cell"], ""),
        ],
    )
    def test_did_you_mean(self, word, known, suggestion):
        assert did_you_mean(word, known) == suggestion
        assert did_you_mean(word, iter(known)) == suggestion

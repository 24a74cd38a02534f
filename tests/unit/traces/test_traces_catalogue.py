"""Finding and fetching traces; the server is one on this machine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from traces import catalogue as module
from traces.catalogue import DATA, CatalogueEntry, catalogue, download, fetch, find_trace
from traces.errors import TraceFileError
from traces.formats import READERS, open_trace

BODY = b'{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [0]}\n' * 4000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/whole")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/gone" else 200)
        if self.path != "/unsized":
            self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:1000] if self.path == "/cut" else BODY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def entry(url: str | None, sha256: str | None = DIGEST, size: int | None = None) -> CatalogueEntry:
    return CatalogueEntry(format="mooncake", description="", licence="", url=url, sha256=sha256, bytes=size)


def refusal(given: CatalogueEntry, target: Path, **options: int) -> str:
    with pytest.raises(TraceFileError) as caught:
        download(given, target, **options)  # type: ignore[arg-type]
    assert list(target.parent.iterdir()) == [], "nothing of a refused download stays behind"
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_download_is_streamed_checked_and_whole(server: str, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "deep" / "trace.jsonl"
    got = download(entry(f"{server}/whole"), target, progress=lambda done, total: seen.append((done, total)))
    assert got == target and target.read_bytes() == BODY
    assert [path.name for path in target.parent.iterdir()] == ["trace.jsonl"]
    assert seen[-1] == (len(BODY), len(BODY)) and len(seen) > 2 and seen == sorted(seen)
    assert open_trace(target).total_requests == 4000


@pytest.mark.parametrize("path", ["/moved", "/unsized"])
def test_redirects_and_unknown_lengths(server: str, tmp_path: Path, path: str) -> None:
    assert download(entry(server + path), tmp_path / "t.jsonl").read_bytes() == BODY


def test_what_is_there_already_is_not_fetched_again(tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    target.write_bytes(BODY)
    assert download(entry("http://127.0.0.1:1/closed"), target) == target


def test_a_wrong_file_that_is_there_is_replaced_only_by_the_right_one(server: str, tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    target.write_bytes(b"old")
    with pytest.raises(TraceFileError):
        download(entry(f"{server}/cut"), target)
    assert target.read_bytes() == b"old"
    assert download(entry(f"{server}/whole"), target).read_bytes() == BODY


def test_a_wrong_digest(server: str, tmp_path: Path) -> None:
    text = refusal(entry(f"{server}/whole", sha256="0" * 64), tmp_path / "t.jsonl")
    assert f"sha256 is not {'0' * 64} ({DIGEST}); fetch again" in text


def test_a_truncated_body(server: str, tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    text = refusal(entry(f"{server}/cut"), target)
    assert text.startswith(f"{server}/cut: cannot be downloaded (") and f"by hand to {target}" in text


def test_not_found(server: str, tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    text = refusal(entry(f"{server}/gone"), target)
    assert text == f"{server}/gone: cannot be downloaded (HTTP 404); download it by hand to {target}"


def test_no_network(tmp_path: Path) -> None:
    target = tmp_path / "t.jsonl"
    text = refusal(entry("http://127.0.0.1:1/t.jsonl"), target)
    assert text.startswith("http://127.0.0.1:1/t.jsonl: cannot be downloaded (")
    assert text.endswith(f"; download it by hand to {target}")


def test_a_body_larger_than_it_may_be(server: str, tmp_path: Path) -> None:
    assert "is larger than it may be (1000 bytes)" in refusal(
        entry(f"{server}/unsized"), tmp_path / "t.jsonl", max_bytes=1000
    )
    assert "(99 bytes)" in refusal(entry(f"{server}/whole", size=99), tmp_path / "t.jsonl")


def test_an_unknown_digest_is_told_and_must_be_accepted(server: str, tmp_path: Path) -> None:
    unknown = entry(f"{server}/whole", sha256=None)
    assert f"--accept-digest {DIGEST}" in refusal(unknown, tmp_path / "t.jsonl")
    with pytest.raises(TraceFileError, match="sha256 is not"):
        download(unknown, tmp_path / "t.jsonl", accept_digest="1" * 64)
    assert download(unknown, tmp_path / "t.jsonl", accept_digest=DIGEST).read_bytes() == BODY


def test_a_folder_that_cannot_be_written(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceFileError, match=r"cannot be written \(.+\); choose another folder"):
        download(entry(f"{server}/whole"), tmp_path / "file" / "t.jsonl")


def test_fetch_knows_the_names(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch("tiny_conversation", tmp_path) == DATA / "tiny_conversation.jsonl"
    monkeypatch.setattr(module, "_catalogue", lambda: {"some": entry(f"{server}/whole")})
    assert fetch("some", tmp_path).name == "some.jsonl"
    with pytest.raises(TraceFileError, match=r"other: is not in the catalogue .*; choose one of some"):
        fetch("other", tmp_path)


def test_the_catalogue() -> None:
    known = catalogue()
    assert {row.format for row in known.values()} == {"mooncake", "bailian", "weka"} < set(READERS)
    for name, row in known.items():
        assert row.licence == "Apache-2.0" and row.description
        assert row.sha256 is None or len(bytes.fromhex(row.sha256)) == 32
        assert (row.url is None) == (DATA / f"{name}.jsonl").is_file()
        assert row.url is None or row.url.startswith("https://")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$HARNESS_TRACES with two traces in it, and beside it a file that no name may reach."""
    traces = tmp_path / "traces"
    traces.mkdir()
    (traces / "one.jsonl").write_bytes(BODY)
    (traces / "chat.json").write_text("[]")
    (tmp_path / "secret.jsonl").write_bytes(BODY)
    monkeypatch.setenv("HARNESS_TRACES", str(traces))
    return traces


def test_names_are_found_in_the_package_then_in_the_environment(folder: Path) -> None:
    assert find_trace("tiny_conversation") == DATA / "tiny_conversation.jsonl"
    assert find_trace("one") == find_trace("one.jsonl") == folder / "one.jsonl"
    assert find_trace("chat") == folder / "chat.json"
    (folder / "tiny_conversation.jsonl").write_bytes(BODY)
    assert find_trace("tiny_conversation") == DATA / "tiny_conversation.jsonl"


def test_paths_are_used_as_given(folder: Path) -> None:
    assert find_trace(str(folder / "one.jsonl")) == folder / "one.jsonl"
    assert find_trace("./one.jsonl", base=folder) == folder / "one.jsonl"
    assert find_trace(Path("traces/one.jsonl"), base=folder.parent) == folder / "one.jsonl"
    with pytest.raises(TraceFileError, match="there is no such trace file"):
        find_trace("traces/none.jsonl", base=folder.parent)


@pytest.mark.parametrize("name", ["..", ".", "", ".hidden", "..\\secret", "~", "a b", "one\n", "C:one", "one\0"])
@pytest.mark.usefixtures("folder")
def test_a_name_stays_a_name(name: str) -> None:
    with pytest.raises(TraceFileError, match=r"is not a trace's name .*; give a plain name"):
        find_trace(name)


def test_a_name_does_not_lead_out_of_its_folder(folder: Path) -> None:
    (folder / "sly.jsonl").symlink_to(folder.parent / "secret.jsonl")
    (folder / "inner.jsonl").symlink_to(folder / "one.jsonl")
    with pytest.raises(TraceFileError, match="leads out of its folder"):
        find_trace("sly")
    assert find_trace("inner") == folder / "inner.jsonl"
    # Who writes the path has seen it.
    assert find_trace(folder / "sly.jsonl") == folder / "sly.jsonl"


def test_an_unknown_name_says_where_it_was_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceFileError) as caught:
        find_trace("nothing")
    assert f"(looked in the package and in {folder}); give a path" in str(caught.value)
    with pytest.raises(TraceFileError, match=r"; run: harness traces fetch mooncake_toolagent$"):
        find_trace("mooncake_toolagent")
    monkeypatch.chdir(folder.parent)
    with pytest.raises(TraceFileError, match=r"write \./secret.jsonl"):
        find_trace("secret.jsonl")
    monkeypatch.delenv("HARNESS_TRACES")
    with pytest.raises(TraceFileError, match=r"\$HARNESS_TRACES is not set"):
        find_trace("one")

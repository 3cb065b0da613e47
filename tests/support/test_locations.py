"""What is a path of this machine, and what the URL of another place."""

from __future__ import annotations

import pytest

from mock_scheduler.support.locations import find_path, find_protocol, normalize_location


@pytest.mark.parametrize(
    ("location", "protocol", "path"),
    [
        ("runs/tp2", None, "runs/tp2"),
        ("/a b/c:d", None, "/a b/c:d"),
        ("C://runs", None, "C://runs"),  # a drive
        ("runs/s3://bucket", None, "runs/s3://bucket"),
        ("file:relative", None, "file:relative"),
        ("file:///a%20b", "file", "/a b"),
        ("FILE://localhost/a", "file", "/a"),
        ("local:///a", "local", "/a"),
        ("s3://bucket/a%20b", "s3", None),
        ("S3://bucket", "s3", None),
    ],
)
def test_a_location_is_a_path_or_the_url_of_another_place(
    location: str, protocol: str | None, path: str | None
) -> None:
    assert (find_protocol(location), find_path(location)) == (protocol, path)


@pytest.mark.parametrize("location", ["file://host/x", "file://", "local://x"])
def test_a_url_of_no_path_here_is_refused(location: str) -> None:
    with pytest.raises(ValueError, match=f"^'{location}' names no local folder: write file:///absolute/path, or the"):
        find_path(location)


def test_a_location_has_one_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [normalize_location(text) for text in ("~/runs", "S3://Bucket/A", "./~x", "C://x")] == [
        *("/home/me/runs", "s3://Bucket/A", "./~x", "C://x")
    ]
    with pytest.raises(
        ValueError, match="'~nobody-here/x' begins with the home folder of '~nobody-here', which is not"
    ):
        normalize_location("~nobody-here/x")

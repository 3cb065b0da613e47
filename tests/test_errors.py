"""No message repeats a password."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest

from mock_scheduler import errors
from mock_scheduler.cli import main
from mock_scheduler.errors import ConfigError, MockSchedulerError, RecordingError, redact
from mock_scheduler.recording.storage import open_storage


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://user:pass@bucket/x", "s3://user:***@bucket/x"),
        ("https://u:p@ss/w@host:80/a?b=1", "https://u:***@host:80/a?b=1"),
        ("redis://:pw@h:1 and postgres://u:80pw@h", "redis://:***@h:1 and postgres://u:***@h"),
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("x?token=abc&y=1", "x?token=***&y=1"),
        ("b?X-Amz-Credential=AK/x&X-Amz-Signature=ff00", "b?X-Amz-Credential=***&X-Amz-Signature=***"),
        ("{'aws_secret_access_key': 'abc/def'}", "{'aws_secret_access_key': '***'}"),
        ("id AKIAABCDEFGHIJKLMNOP", "id ***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("env WANDB_API_KEY=abc 'HF_TOKEN=a b' x", "env WANDB_API_KEY=*** 'HF_TOKEN=***' x"),
        (
            "train.py --hf-token abc --password 'a b' --secret-key=abc",
            "train.py --hf-token *** --password *** --secret-key=***",
        ),
    ],
)
def test_secrets_are_left_out(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8300/v1/x@y",
        "abfs://container@account.dfs.core.windows.net/x",
        "rows: 5 tokens=4 key = 3",
        "http://h:80, a@b",
        "~/a@b:c/step_000001",
        "TOKENIZERS_PARALLELISM=false --tokenizer-model x --max-tokens 5 --pad-token-id 3 --token --x",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://" * 40_000, "http://" * 40_000),
        ("API_KEY_" * 40_000, "API_KEY_" * 40_000),
        ("x@" + "://:" * 40_000 + "p@h", "x@://:***@h"),
        ("?" + "key" * 40_000 + "=x", "?" + "key" * 40_000 + "=x"),
        (" --x-key-token" * 40_000 + "=x", " --x-key-token" * 40_000 + "=***"),
    ],
)
def test_a_hostile_text_takes_no_longer_than_its_length_asks_for(text: str, shown: str) -> None:
    """A key of 320 KB in a configuration took six minutes to be named, and one of 4 MB would have taken a day."""
    started = time.process_time()
    assert redact(text) == shown
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "kind", [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, MockSchedulerError)]
)
def test_every_error_leaves_them_out_and_stays_picklable(kind: type[MockSchedulerError]) -> None:
    error = kind("cannot read s3://user:pass@bucket/x")
    assert str(error) == "cannot read s3://user:***@bucket/x"
    assert (type(pickle.loads(pickle.dumps(error))), str(pickle.loads(pickle.dumps(error)))) == (kind, str(error))


def test_a_recordings_address_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    storage = open_storage("memory://user:pass@bucket/x")
    assert (storage.location, storage.path("a")) == ("memory://user:***@bucket/x", "memory://user:***@bucket/x/a")
    assert main(["inspect", "memory://user:pass@bucket/x"]) == 5
    assert main(["inspect", "nosuch://user:pass@bucket/x"]) == 5
    assert main(["launch", "quickstart", "rollout_mock.mode='s3://user:pass@bucket'"]) == 5
    assert "pass@" not in "".join(capsys.readouterr())


def test_a_plain_error_at_the_edge_is_shown_without_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("lost s3://user:pass@bucket")

    monkeypatch.setattr("mock_scheduler.commands.recordings.run_inspect", fail)
    assert main(["inspect", "x"]) == 70
    assert "lost s3://user:***@bucket" in capsys.readouterr().err


def test_arguments_that_are_no_text_are_kept() -> None:
    assert RecordingError("a", 5).args == ("a", 5)
    assert ConfigError().args == ()


def test_every_page_that_an_error_names_is_there() -> None:
    pages = {
        kind.page for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MockSchedulerError)
    }
    assert len(pages) > 5
    root = Path(__file__).parents[1]
    assert [page for page in pages if page and not (root / page).is_file()] == []

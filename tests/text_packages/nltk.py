"""A stand-in for NLTK, which textarena asks for word lists: a download is an error of the test."""


def download(*names: object, **options: object) -> bool:
    """Fails: nothing is downloaded."""
    raise AssertionError(f"a download of {names} was asked for")

"""The registry of the stand-in."""

import textarena

ENV_REGISTRY = dict(textarena._GAMES)

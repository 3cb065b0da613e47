"""Where the family has its class of a sample."""

from tests.adapters.slime.samples import Sample as Sample

"""The faults of packed lines that ``configs/planted_faults.yaml`` runs, as entries of the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipelines.megatron import learner, places
from tests.faults import packing_mask_dropped, packing_positions_continued
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import replaced


def _planting(plant: Callable[[Fired], None], owner: object, name: str) -> Injector:
    """What ``plant`` puts in the place of an attribute is taken back."""

    @contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        with replaced(owner, name, lambda original: original):
            plant(fired)
            yield

    return inject


mask_dropped = _planting(packing_mask_dropped.plant, places, "row_mask")
positions_continued = _planting(packing_positions_continued.plant, learner, "own_batch")

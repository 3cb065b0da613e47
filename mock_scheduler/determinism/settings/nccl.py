"""Settings of collectives. NCCL reads its variables when a communicator is made and keeps them."""

from __future__ import annotations

from functools import partial

from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting

_nccl = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.PROCESS_GROUP, reader="NCCL")
_CHANNELS = "chunks are dealt to channels, which sets the order of sums; fix minimum and maximum to one number"
_CHUNKS = "it sets the size of the chunks, and so the order of sums; keep it equal"
_TOPOLOGY = "the order of a ring follows the topology; keep it equal"

_ALGORITHMS: tuple[Setting, ...] = (
    _nccl(
        name="NCCL_NVLS_ENABLE",
        pattern="0",
        recommended="0",
        exported=True,
        between_runs=Between.MUST_MATCH,
        source="NVIDIA/nccl issues 1497 and 2360",
        remedy="sums inside the switch differ between calls",
    ),
    _nccl(
        name="NCCL_TUNER_PLUGIN",
        pattern="(none)?",
        recommended="",
        source="Megatron-LM tests/functional_tests/shell_test_utils/_run_training.sh",
        remedy="a tuner plugin overrides NCCL_ALGO and NCCL_PROTO without a word; leave it empty",
    ),
    _nccl(
        name="NCCL_PROTO",
        recommended="Simple",
        source="Megatron-LM functional tests pin Simple",
        remedy="the protocol sets the chunks of a sum; keep it equal, for example Simple",
    ),
    _nccl(
        name="NCCL_COLLNET_ENABLE",
        recommended="0",
        source="NCCL documentation, NCCL_COLLNET_ENABLE",
        remedy="1 lets the network sum, in its own order, unless NCCL_ALGO chose it; keep it equal",
    ),
)

_CHUNK_NAMES = ("NCCL_NTHREADS", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_BUFFSIZE")
_CHANNEL_NAMES = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
_TOPOLOGY_NAMES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_LAUNCH_MODE", "NCCL_NET_PLUGIN")

_ORDER: tuple[Setting, ...] = (
    *(_nccl(name=name, source="NVIDIA/nccl issue 1055", remedy=_CHANNELS) for name in _CHANNEL_NAMES),
    *(_nccl(name=name, source="Megatron-LM functional tests pin them", remedy=_CHUNKS) for name in _CHUNK_NAMES),
    *(_nccl(name=name, source="NVIDIA/nccl issues 1461 and 23", remedy=_TOPOLOGY) for name in _TOPOLOGY_NAMES),
    *(
        _nccl(name=name, kind=Kind.FLAG, source="NVIDIA/nccl issues 1461 and 23", remedy=_TOPOLOGY)
        for name in ("nccl.topo_file_sha256", "nccl.graph_file_sha256")
    ),
)

_NODE_NAMES = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")
_LOG_NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")

_PER_NODE: tuple[Setting, ...] = tuple(
    _nccl(name=name, per_node=True, between_runs=Between.RECORDED, source="NCCL documentation", remedy=remedy)
    for names, remedy in ((_NODE_NAMES, "it names devices or files of one node"), (_LOG_NAMES, "it steers the log"))
    for name in names
)

NCCL_SETTINGS: tuple[Setting, ...] = (*_ALGORITHMS, *_ORDER, *_PER_NODE)

NCCL_FAMILIES: tuple[Family, ...] = (
    Family(prefix="NCCL_", read_at=ReadAt.PROCESS_GROUP, reader="NCCL"),
    Family(
        prefix="TORCH_NCCL_", read_at=ReadAt.PROCESS_GROUP, reader="torch.distributed", between_runs=Between.RECORDED
    ),
)

"""Lists settings of the GPU's libraries and Ascend's (precision, workspaces, streams, allocation), and of collectives.

NCCL reads its variables when a communicator is made, and keeps them.
"""

from __future__ import annotations

from functools import partial

from mock_scheduler.determinism.settings.setting import Between, Family, Kind, ReadAt, Setting

_cuda = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.CUDA_CONTEXT)
_recorded = partial(Setting, between_runs=Between.RECORDED, read_at=ReadAt.CUDA_CONTEXT)
_flag = partial(Setting, kind=Kind.FLAG, between_runs=Between.REPORTED, read_at=ReadAt.EVERY_CALL, reader="torch")
_TF32 = "it changes the precision of float32 products; keep it equal, and off where a reference is computed"
_SPLIT_K = "partial sums of bfloat16 and float16 products may be added in low precision; keep it equal"
_BACKEND = "it decides between implementations of one product, which sum in other orders; keep it equal"

_CUBLAS = "libcublas and libcublasLt 13.1.1.3"
_CUBLAS_NAMES: dict[str, tuple[str, ...]] = {
    "it lets products of another type stand for float32 or float64 ones; keep it equal": (
        *("CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY"),
        "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
    ),
    "it bears on the choice of a product's algorithm; leave it unset": (
        *("CUBLASLT_HEURISTICS_LUT_FILE", "CUBLASLT_HEURISTICS_CACHE_CAPACITY", "CUBLAS_AUTOTUNING_CACHE_CAPACITY"),
        *("CUBLAS_FORCE_XMMA_KERNEL_INIT", "CUBLASLT_DISABLE_CPU_INSTRUCTIONS_MASK"),
    ),
}

_CUDA: tuple[Setting, ...] = (
    _cuda(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        reader="CUDA",
        source="megatron/training/arguments.py: 1 with tp > 1 or cp > 1 before Blackwell",
        remedy="it sets the order of overlapped communication and kernels; keep it equal",
    ),
    _cuda(name="NVIDIA_TF32_OVERRIDE", reader="cuBLAS and cuDNN", source="NVIDIA driver documentation", remedy=_TF32),
    _cuda(
        name="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        reader="torch",
        read_at=ReadAt.TORCH_IMPORT,
        source="torch, aten/src/ATen/Context.cpp",
        remedy=_TF32,
    ),
    _cuda(
        name="TORCH_BLAS_PREFER_CUBLASLT",
        reader="torch",
        read_at=ReadAt.TORCH_IMPORT,
        source="torch.backends.cuda.preferred_blas_library",
        remedy=_BACKEND,
    ),
    _cuda(
        name="CUBLASLT_WORKSPACE_SIZE",
        reader="torch",
        source="torch, aten/src/ATen/cuda/CUDABlas.cpp",
        remedy="cuBLASLt chooses its algorithm by the size of the workspace; keep it equal",
    ),
    _cuda(
        name="TORCH_CUBLASLT_UNIFIED_WORKSPACE",
        reader="torch",
        source="torch, aten/src/ATen/cuda/CUDABlas.cpp",
        remedy="cuBLASLt then has cuBLAS's workspace, and chooses its algorithm by the size; keep it equal",
    ),
    *(
        _cuda(name=name, reader="cuBLAS", source=f"names in {_CUBLAS}, not seen on a device here", remedy=remedy)
        for remedy, names in _CUBLAS_NAMES.items()
        for name in names
    ),
    *(
        _cuda(
            name=name,
            reader="apex",
            read_at=ReadAt.EVERY_CALL,
            source="NVIDIA/apex, commit 6424da3, contrib/csrc/group_norm_v2",
            remedy="it changes how many blocks share a group norm's sums; keep it equal",
        )
        for name in ("APEX_GROUP_NORM_FPROP_SM_MARGIN", "APEX_GROUP_NORM_BPROP_SM_MARGIN")
    ),
    _recorded(
        name="CUDA_MODULE_LOADING",
        reader="CUDA",
        source="CUDA documentation, environment variables",
        remedy="it sets when kernels are loaded, not what they compute",
    ),
    _recorded(
        name="CUDA_LAUNCH_BLOCKING",
        reader="CUDA",
        source="CUDA documentation, environment variables",
        remedy="where it changes bits there is a race",
    ),
    *(
        _recorded(
            name=name,
            reader="torch",
            source="NVIDIA/nccl issue 2360: the history of allocations can change alignment",
            remedy="it sets where tensors lie",
        )
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ),
    _recorded(
        name="CUDA_VISIBLE_DEVICES",
        per_node=True,
        reader="CUDA",
        source="CUDA documentation, environment variables",
        remedy="it maps ranks to devices of one node",
    ),
)

_FLAGS: tuple[Setting, ...] = (
    *(
        _flag(name=name, source="torch documentation, TensorFloat-32 on Ampere", remedy=_TF32)
        for name in (
            "torch.cudnn.allow_tf32",
            "torch.cuda.matmul.allow_tf32",
            "torch.float32_matmul_precision",
            "torch.cuda.matmul.fp32_precision",
            "torch.cudnn.conv.fp32_precision",
            "torch.mkldnn.matmul.fp32_precision",
        )
    ),
    *(
        _flag(name=name, source="torch documentation, torch.backends.cuda.matmul", remedy=_SPLIT_K)
        for name in (
            "torch.cuda.matmul.allow_bf16_reduced_precision_reduction",
            "torch.cuda.matmul.allow_fp16_reduced_precision_reduction",
            "torch.cuda.matmul.allow_fp16_accumulation",
        )
    ),
    _flag(
        name="torch.cuda.preferred_blas_library",
        source="torch documentation, torch.backends.cuda.preferred_blas_library",
        remedy=_BACKEND,
    ),
    *(
        _flag(name=f"torch.sdp.{name}", source="torch documentation, torch.backends.cuda", remedy=_BACKEND)
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
)

_ASCEND_SOURCE = "Ascend CANN and ATB documentation; not verified on a device here"
_ASCEND: tuple[Setting, ...] = tuple(
    Setting(
        name=name,
        pattern=pattern,
        recommended=recommended,
        between_runs=Between.MUST_MATCH,
        read_at=ReadAt.PROCESS_GROUP,
        reader="CANN",
        source=_ASCEND_SOURCE,
        remedy=f"only {allowed} sums in a fixed order on Ascend",
    )
    for name, pattern, recommended, allowed in (
        ("HCCL_DETERMINISTIC", "true|strict", "true", "true or strict"),
        ("LCCL_DETERMINISTIC", "1|true", "1", "1 or true"),
        ("CLOSE_MATMUL_K_SHIFT", "1", "1", "1"),
        ("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", "0", "0"),
    )
)

DEVICE_SETTINGS: tuple[Setting, ...] = (*_CUDA, *_FLAGS, *_ASCEND)


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

_SYMMETRIC = "kernels over registered (symmetric) memory sum in an order of their own; keep it equal"
_SYMMETRIC_NAMES = ("NCCL_SYM_KERNEL", "NCCL_WIN_ENABLE", "NCCL_SYM_NOWIN_ENABLE", "NCCL_SYM_GIN_KERNELS_ENABLE")
_OTHERS = "it sets variables of NCCL that this process's environment does not show; leave it unset"

_NEWER: tuple[Setting, ...] = (
    *(_nccl(name=name, source="NVIDIA/nccl 2.30.7, src", remedy=_SYMMETRIC) for name in _SYMMETRIC_NAMES),
    _nccl(
        name="NCCL_PAT_ENABLE",
        source="NVIDIA/nccl 2.30.7, src/graph/tuning.cc",
        remedy="it lets reduce-scatter go over trees (PAT) in place of rings; keep it equal",
    ),
    *(
        _nccl(name=name, source="NVIDIA/nccl 2.30.7, src", remedy=_OTHERS)
        for name in ("NCCL_CONF_FILE", "NCCL_ENV_PLUGIN")
    ),
)

_NODE_NAMES = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE")
_LOG_NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")

_PER_NODE: tuple[Setting, ...] = tuple(
    _nccl(name=name, per_node=True, between_runs=Between.RECORDED, source="NCCL documentation", remedy=remedy)
    for names, remedy in ((_NODE_NAMES, "it names devices or files of one node"), (_LOG_NAMES, "it steers the log"))
    for name in names
)

NCCL_SETTINGS: tuple[Setting, ...] = (*_ALGORITHMS, *_ORDER, *_NEWER, *_PER_NODE)

# NVIDIA, NCCL documentation, environment variables, and NCCL_PARAM in the sources of 2.30.7: the ones that choose
# paths, protocols, sizes or channels.
_NCCL_DOCUMENTED = """
ALLGATHERV_ENABLE CHUNK_SIZE IGNORE_COLLNET_MISMATCH IGNORE_NET_MISMATCH LL128_C2C LSA_TEAM_SIZE MAX_NRINGS MIN_NRINGS
MNNVL_CLIQUE_ID MNNVL_CROSS_CLIQUE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MULTI_RANK_GPU_ENABLE
NCHANNELS_PER_NET_PEER NET_DISABLE_INTRA NET_FORCE_MERGE NET_MERGE_LEVEL NET_MERGE_POLICY NET_OVERHEAD
NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_READ_ENABLE
P2P_USE_CUDA_MEMCPY RMA_DISABLE SYM_CE_THRESHOLD SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE UNPACK_DOUBLE_NCHANNELS
ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_NODE_THRESHOLD COMM_BLOCKING
CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX
IB_MERGE_NICS IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_ROCE_VERSION_NUM IB_SL
IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY LAUNCH_ORDER_IMPLICIT LL128_BUFFSIZE LL128_NTHREADS
LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_P2P_NCHANNELS MNNVL_ENABLE NET
NETDEVS_POLICY NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_SHARED_BUFFERS NET_SHARED_COMMS NVB_DISABLE NVLS_CHUNKSIZE
NVLS_NCHANNELS P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PXN_C2C
PXN_DISABLE RUNTIME_CONNECT SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SYM_CTAS THREAD_THRESHOLDS TREE_THRESHOLD
"""
# torch, torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
_TORCH_NCCL_DOCUMENTED = """
ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BLOCKING_WAIT COORD_CHECK_MILSEC CUDA_EVENT_CACHE DESYNC_DEBUG
DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY NAN_CHECK RETHROW_CUDA_ERRORS
TRACE_BUFFER_SIZE USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
"""


NCCL_FAMILIES: tuple[Family, ...] = (
    Family(
        prefix="NCCL_",
        read_at=ReadAt.PROCESS_GROUP,
        reader="NCCL",
        documented=frozenset(f"NCCL_{name}" for name in _NCCL_DOCUMENTED.split()),
    ),
    Family(
        prefix="TORCH_NCCL_",
        read_at=ReadAt.PROCESS_GROUP,
        reader="torch.distributed",
        between_runs=Between.RECORDED,
        documented=frozenset(f"TORCH_NCCL_{name}" for name in _TORCH_NCCL_DOCUMENTED.split()),
    ),
)

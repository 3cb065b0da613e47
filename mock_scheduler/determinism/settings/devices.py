"""Settings of the GPU's libraries, and of Ascend's: precision of products, workspaces, streams, allocation."""

from __future__ import annotations

from functools import partial

from mock_scheduler.determinism.settings.setting import Between, Kind, ReadAt, Setting

_cuda = partial(Setting, between_runs=Between.REPORTED, read_at=ReadAt.CUDA_CONTEXT)
_recorded = partial(Setting, between_runs=Between.RECORDED, read_at=ReadAt.CUDA_CONTEXT)
_flag = partial(Setting, kind=Kind.FLAG, between_runs=Between.REPORTED, read_at=ReadAt.EVERY_CALL, reader="torch")
_TF32 = "it changes the precision of float32 products; keep it equal, and off where a reference is computed"
_SPLIT_K = "partial sums of bfloat16 and float16 products may be added in low precision; keep it equal"
_BACKEND = "it decides between implementations of one product, which sum in other orders; keep it equal"

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

"""A run record as the page writes it, for the tests of what reads records."""

from typing import Any

from stepwell.launch.options import LaunchOptions

ZERO = (
    "launches passes encoders submits syncs copies bind_groups_created bind_groups_reused bind_groups_evicted uploads "
    "uploads_skipped upload_bytes immediates immediates_bytes readbacks readback_bytes replayed buffers_created "
    "bytes_created buffers_destroyed bytes_destroyed pool_hits pool_misses"
)


def make_record(
    times: list[float], *, kv: str = "static", policy: str = "adaptive", classes: int = 0
) -> dict[str, Any]:
    """One token per time, in ms; the first is the prefill of 3 tokens.

    ``classes`` > 0: the KV buffers double from 64 KiB at every that many tokens.
    """
    tokens = [
        {
            "index": i,
            "position": 3 + i,
            "id": 100 + i,
            "ms": ms,
            "encode_ms": ms / 10,
            "wait_ms": ms / 2,
            "gpu_ms": None,
            **dict.fromkeys(ZERO.split(), 0),
            "launches": 7,
            "refused": "off",
            "buffers_created": i % 2,
            "kv_class_bytes": 65536 << (i // classes if classes else 0),
            "reserved_bytes": 3 << 20,
            "in_use_bytes": 2 << 20,
        }
        for i, ms in enumerate(times)
    ]
    account = {
        "reserved_bytes": 2,
        "in_use_bytes": 1,
        "requested_bytes": 1,
        "peak_reserved_bytes": 5 << 20,
        "buffers": 1,
    }
    return {
        "schema": 2,
        "scenario": {
            "model": "tiny",
            "sha256": "0" * 64,
            "prompt": "<b>Hi</b> & bye",
            "raw": False,
            "tokens": 64,
            "policy": policy,
            "kv": kv,
            "context": 16,
            "temperature": 0,
            "top_k": 0,
            "top_p": 1,
            "seed": 0,
            "ban_eos": False,
            "ignore_eos": False,
            "stop": [],
            "top_logits": 0,
        },
        "environment": {
            "adapter": {
                "vendor": "google",
                "architecture": "swiftshader",
                "description": "",
                "is_fallback": True,
                "is_software": True,
                "subgroup_size": 4,
            },
            "features": ["subgroups"],
            "browser": "Chromium 156",
            "flags": ["--headless=new"],
            "cross_origin_isolated": True,
            "timer_resolution_us": 5,
            "pyodide": "314.0.7",
            "stepwell": "0.1.0",
        },
        "prompt_ids": [1, 2, 3],
        "token_ids": [token["id"] for token in tokens],
        "text": "<script>alert(1)</script>",
        "finish_reason": "length",
        "ttft_ms": times[0] if times else None,
        "tokens": tokens,
        "memory": {"peak_reserved_bytes": 5 << 20, "by_role": {"weights": account, "kv": account}},
        "launch": {
            "options": LaunchOptions().as_dict(),
            "params": "immediates",
            "kernels": {"kernels": "quad", "fused": False, "subgroups": 4, "dot4": False, "f16": False},
            "identity_rate": 0.5,
            "plans": {"recorded": 0, "replayed": 0, "refused": {"off": len(times)}, "invalidated": 0},
            "bind_groups": {"size": 7, "evicted": 0},
            "variants": {"matmul": {"shapes": 2, "evicted": 1}},
            "workspace_bytes": 0,
            "tuned": [],
        },
    }


KERNELS: dict[str, Any] = {
    "steps": 24,
    "position": 44,
    "launches_per_token": 165,
    "clock_us": 0.032,
    "coarse_clock": False,
    "pass_us": 8.0,
    "us_per_token": 2420.5,
    "net_us_per_token": 1100.5,
    "plain_read_gb_s": 4150.0,
    "plain_read_bytes": 1 << 30,
    "weights": {
        "launches": 129,
        "bytes_per_token": 2_400_000_000,
        "us_per_token": 2032.0,
        "net_us_per_token": 1000.0,
        "gb_s": 2400.0,
        "share_of_plain_read": 2400 / 4150,
    },
    "rows": [
        {
            "node": node,
            "kernel": kernel,
            "shape": shape,
            "format": "u4" if shape else "",
            "launches": launches,
            "us_per_launch": 8 + net,
            "net_us_per_launch": net,
            "us_per_token": launches * (8 + net),
            "net_us_per_token": launches * net,
            "bytes_per_launch": nbytes,
            "gb_s": nbytes / net / 1e3 if nbytes and net else None,
            "share": launches * net / 1100.5,
        }
        for node, kernel, shape, launches, net, nbytes in (
            ("gate_up", "matvec", "3072 x 16384", 32, 16.0, 31457280.0),
            ("ffn_down", "matvec", "8192 x 3072", 32, 10.0, 15728640.0),
            ("output", "matvec", "3072 x 200064", 1, 168.0, 384122880.0),
            ("attention", "attention_decode", "", 64, 1.5625, 188416.0),
            ("<argmax>", "argmax", "", 35, 0.0, 0.0),
            ("embed", "embed", "3072 x 200064", 1, 0.5, 1920.0),
        )
    ],
}
"""The table of a GPU, as a record has it."""


def with_kernels(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record of a run that was asked for the table."""
    record["scenario"]["kernel_times"] = True
    return {**record, "kernels": {**KERNELS, **changes}}

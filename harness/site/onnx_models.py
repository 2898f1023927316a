"""Small ONNX models whose K and V grow like those of a decoding language model: what ``attach`` is measured with.

K and V are tensors of 2,048 bytes per position ([1, 8, positions, 64] in f32), named as exporters name them:
``past_key_values.N.key`` in, ``present.N.key`` out; a step takes ``row`` and gives ``reads``, which tell what was in
K and V.  There are no weights: a model is a few kilobytes.

``kv64``,
``kv16``        what growing costs and little else: the row of each tensor at position ``probe`` plus ``row`` is read,
                and fills the new tensor (Expand, whose kernel writes about as fast as the memory takes it)
``append``      16 tensors that keep all of their past: ``row`` is appended to each (Concat), and the positions
                ``probe`` are read; on a CPU adapter that kernel of the runtime takes some ten times as long per byte
``gqa``         two layers of GroupQueryAttention, as exported language models have them: 4 tensors
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from stepwell.replay.kv_shapes import KV_WORKLOADS, POSITION_BYTES

HEADS = 8
HEAD_DIM = POSITION_BYTES // (4 * HEADS)
FOLDER = "models/onnx"
"""The folder of the models in the site."""
_OPSETS = (helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1))
_IR_VERSION = 10  # of opset 21: no runtime that knows the one refuses the other


@dataclass(frozen=True, slots=True)
class Model:
    """A model of ``tensors`` growing tensors, K and V of each layer alternately; ``make`` gives the file's bytes."""

    tensors: int
    make: Callable[[int], bytes]

    def bytes(self) -> bytes:
        """The file."""
        return self.make(self.tensors)


def kv_names(tensors: int) -> list[str]:
    """The names of ``tensors`` tensors: ``0.key``, ``0.value``, ``1.key``, …"""
    return [f"{i // 2}.{'value' if i % 2 else 'key'}" for i in range(tensors)]


def filling(tensors: int) -> bytes:
    """A model whose tensors are full of one value: a row of the step before, plus the new row."""
    nodes = []
    for kv in kv_names(tensors):
        nodes += [
            helper.make_node("Gather", [f"past_key_values.{kv}", "probe"], [f"before.{kv}"], f"read.{kv}", axis=2),
            helper.make_node("Add", [f"before.{kv}", "row"], [f"value.{kv}"], f"add.{kv}"),
            helper.make_node("Expand", [f"value.{kv}", "shape"], [f"present.{kv}"], f"fill.{kv}"),
        ]
    values = [f"value.{kv}" for kv in kv_names(tensors)]
    nodes.append(helper.make_node("Concat", values, ["reads"], "reads", axis=0))
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, [4])
    return _serialized("filling", nodes, [*_row_and_probe(1), shape], [_reads(tensors, 1)], tensors)


def appending(tensors: int) -> bytes:
    """A model whose tensors grow by a row; the caller chooses which positions are read."""
    nodes = []
    for kv in kv_names(tensors):
        nodes += [
            helper.make_node("Concat", [f"past_key_values.{kv}", "row"], [f"present.{kv}"], f"append.{kv}", axis=2),
            helper.make_node("Gather", [f"present.{kv}", "probe"], [f"value.{kv}"], f"read.{kv}", axis=2),
        ]
    values = [f"value.{kv}" for kv in kv_names(tensors)]
    nodes.append(helper.make_node("Concat", values, ["reads"], "reads", axis=0))
    return _serialized("appending", nodes, _row_and_probe("probes"), [_reads(tensors, "probes")], tensors)


def attention(tensors: int) -> bytes:
    """A model of GroupQueryAttention; each layer's output is the query, key and value of the next."""
    nodes, state = [], "row"
    for layer in range(tensors // 2):
        result = f"state.{layer + 1}" if layer + 1 < tensors // 2 else "reads"
        pasts = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        presents = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        nodes.append(
            helper.make_node(
                "GroupQueryAttention", [state, state, state, *pasts, "last_position", "positions"],
                [result, *presents], f"attention.{layer}", domain="com.microsoft", num_heads=HEADS, kv_num_heads=HEADS,
            )
        )  # fmt: skip
        state = result
    inputs = [
        helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, 1, HEADS * HEAD_DIM]),
        helper.make_tensor_value_info("last_position", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("positions", TensorProto.INT32, [1]),
    ]
    found = helper.make_tensor_value_info("reads", TensorProto.FLOAT, [1, 1, HEADS * HEAD_DIM])
    return _serialized("attention", nodes, inputs, [found], tensors)


MODELS: Mapping[str, Model] = {
    **{name: Model(shape.tensors, filling) for name, shape in KV_WORKLOADS.items()},
    "append": Model(16, appending),
    "gqa": Model(4, attention),
}
"""The models by name."""


def files() -> dict[str, bytes]:
    """The files of ``FOLDER`` by name: the models, and ``models.js``, which tells the page what they are."""
    tensors = {name: model.tensors for name, model in MODELS.items()}
    module = (
        f"export const [HEADS, HEAD_DIM] = [{HEADS}, {HEAD_DIM}];\n"
        f"/** How many growing tensors each model has. */\nexport const TENSORS = {json.dumps(tensors)};\n"
        "/** The models that do nothing but grow: those named as stepwell's own workloads. */\n"
        f"export const WORKLOADS = {json.dumps(list(KV_WORKLOADS))};\n"
    )
    return {"models.js": module.encode()} | {f"{name}.onnx": model.bytes() for name, model in MODELS.items()}


def _row_and_probe(probes: int | str) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, HEADS, 1, HEAD_DIM]),
        helper.make_tensor_value_info("probe", TensorProto.INT32, [probes]),
    ]


def _reads(tensors: int, probes: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info("reads", TensorProto.FLOAT, [tensors, HEADS, probes, HEAD_DIM])


def _serialized(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    tensors: int,
) -> bytes:
    """The checked model with its K and V as further inputs and outputs; the same bytes every time."""
    for kv in kv_names(tensors):
        past, present = (helper.make_tensor_value_info(f"{prefix}.{kv}", TensorProto.FLOAT, [1, HEADS, axis, HEAD_DIM])
                         for prefix, axis in (("past_key_values", "past"), ("present", "present")))  # fmt: skip
        inputs.append(past)
        outputs.append(present)
    graph = helper.make_graph(nodes, name, inputs, outputs)
    model = helper.make_model(graph, opset_imports=_OPSETS, ir_version=_IR_VERSION, producer_name="stepwell")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))

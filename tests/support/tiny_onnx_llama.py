"""A tiny ONNX decoder with random weights that transformers.js takes for a Llama: K and V go in and come out."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, HEADS, HEAD_DIM, VOCAB = 2, 4, 64, 97
WIDTH = HEADS * HEAD_DIM
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": WIDTH, "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}  # fmt: skip


def tiny_onnx_llama() -> bytes:
    """Layers of attention over all positions, no more: what counts is that every step reads all of K and V."""
    random = np.random.default_rng(5)
    weights = {
        "table": random.normal(size=(VOCAB, WIDTH)),
        "out": random.normal(size=(WIDTH, VOCAB)),
        "scale": np.array(HEAD_DIM**-0.5),
    }
    shapes = {"by_head": (0, 0, HEADS, HEAD_DIM), "flat": (0, 0, WIDTH)}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"])]

    def add(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    inputs = [_info("input_ids", ["batch", "rows"], True), _info("attention_mask", ["batch", "total"], True)]
    outputs = [_info("logits", ["batch", "rows", VOCAB])]
    for i in range(LAYERS):
        heads = {}
        for kind in ("query", "key", "value"):
            weights[f"{kind}.{i}.weight"] = random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
            flat = add("MatMul", [f"x{i}", f"{kind}.{i}.weight"], f"{kind}.{i}.flat")
            rows = add("Reshape", [flat, "by_head"], f"{kind}.{i}.rows")
            heads[kind] = add("Transpose", [rows], f"{kind}.{i}", perm=[0, 2, 1, 3])
        for kind in ("key", "value"):
            add("Concat", [f"past_key_values.{i}.{kind}", heads[kind]], f"present.{i}.{kind}", axis=2)
            inputs.append(_info(f"past_key_values.{i}.{kind}", ["batch", HEADS, "past", HEAD_DIM]))
            outputs.append(_info(f"present.{i}.{kind}", ["batch", HEADS, "total", HEAD_DIM]))
        turned = add("Transpose", [f"present.{i}.key"], f"turned.{i}", perm=[0, 1, 3, 2])
        scores = add("Mul", [add("MatMul", [heads["query"], turned], f"products.{i}"), "scale"], f"scores.{i}")
        mixed = add("MatMul", [add("Softmax", [scores], f"weights.{i}", axis=-1), f"present.{i}.value"], f"mixed.{i}")
        together = add(
            "Reshape", [add("Transpose", [mixed], f"mixed.{i}.rows", perm=[0, 2, 1, 3]), "flat"], f"flat.{i}"
        )
        add("Add", [f"x{i}", together], f"x{i + 1}")
    add("MatMul", [f"x{LAYERS}", "out"], "logits")
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    stored += [numpy_helper.from_array(np.array(shape, dtype=np.int64), name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _info(name: str, shape: list[int | str], integers: bool = False) -> onnx.ValueInfoProto:
    kind = TensorProto.INT64 if integers else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, shape)

"""attach(record) in Chromium: the recorded counts of a small loop are its own, and what a create costs is measured."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from stepwell.replay.traces import ACQUIRE, FLUSH, RELEASE, RUN, read_metadata, read_trace

pytestmark = pytest.mark.browser
KIB = 1 << 10
TOKENS = 6
TENSORS = 5
# one token: TENSORS buffers written by a kernel each, one read back, then the ones of the token before destroyed
LOOP = """async ([record, tokens, tensors, bytes]) => {
  const attachment = stepwell.attach({ ...record, runtime: "a loop" });
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice();
  const errors = [];
  device.addEventListener("uncapturederror", ({ error }) => errors.push(error.message));
  const code = `@group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3u) {
      if (id.x < arrayLength(&x)) { x[id.x] = x[id.x] + 7u; }
    }`;
  const module = device.createShaderModule({ code });
  const pipeline = device.createComputePipeline({ layout: "auto", compute: { module } });
  const { STORAGE, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
  const seen = [];
  let past = [];
  for (let token = 0; token < tokens; token += 1) {
    const present = [];
    for (let i = 0; i < tensors; i += 1) {
      present.push(device.createBuffer({ size: bytes, usage: STORAGE | COPY_SRC | COPY_DST, label: `kv ${i}` }));
    }
    device.queue.writeBuffer(present[0], 0, new Uint32Array([token]));
    for (const buffer of present) {
      const encoder = device.createCommandEncoder();
      const pass = encoder.beginComputePass();
      pass.setPipeline(pipeline);
      const layout = pipeline.getBindGroupLayout(0);
      pass.setBindGroup(0, device.createBindGroup({ layout, entries: [{ binding: 0, resource: { buffer } }] }));
      pass.dispatchWorkgroups(Math.ceil(bytes / 256));
      pass.end();
      device.queue.submit([encoder.finish()]);
    }
    const staging = device.createBuffer({ size: 8, usage: MAP_READ | COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(present[0], 0, staging, 0, 8);
    device.queue.submit([encoder.finish()]);
    await staging.mapAsync(GPUMapMode.READ);
    seen.push(...new Uint32Array(staging.getMappedRange().slice(0)));
    staging.unmap();
    for (const buffer of [...past, staging]) buffer.destroy();
    past = present;
  }
  const before = attachment.summary();
  const costs = await attachment.measureCosts({ mostMs: 500 });
  const summary = attachment.summary();
  const trace = attachment.trace();
  const events = attachment.events().split("\\n").length - 1;
  attachment.detach();
  const after = device.createBuffer({ size: 16, usage: STORAGE });
  after.destroy();
  for (const buffer of past) buffer.destroy();
  return { before, costs, summary, trace, events, seen, errors, later: attachment.summary().totals.creates };
}"""


@pytest.fixture(scope="module")
def page(browser: Browser, server_url: str) -> Iterator[Page]:
    page = browser.new_page()
    html = '<!doctype html><script src="./stepwell-attach.js"></script>'
    # isolated: a clock of 5 us
    headers = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
    page.route("**/attach-lab.html", lambda route: route.fulfill(body=html, content_type="text/html", headers=headers))
    page.goto(f"{server_url.rstrip('/')}/attach-lab.html")
    yield page
    page.close()


@pytest.mark.parametrize("record", [{"record": True}, {"record": True, "policy": "adaptive"}], ids=["alone", "pooled"])
def test_what_a_loop_does_is_recorded(page: Page, record: dict[str, Any], tmp_path: Path) -> None:
    found = page.evaluate(LOOP, [record, TOKENS, TENSORS, 64 * KIB])
    assert found["errors"] == []
    assert found["seen"] == [value for token in range(TOKENS) for value in (token + 7, 7)]
    summary = found["before"]
    assert (summary["tokens"], summary["boundaries"]) == (TOKENS - 1, {"readback": TOKENS, "mark": 0})
    medians = {name: figure["median"] for name, figure in summary["per_token"].items()}
    expected = {
        "creates": TENSORS + 1,
        "created_bytes": TENSORS * 64 * KIB + 8,
        "served_creates": TENSORS,
        "destroys": TENSORS + 1,
        "submits": TENSORS + 1,
        "passes": TENSORS,
        "dispatches": TENSORS,
        "bind_groups": TENSORS,
        "uploads": 1,
        "uploaded_bytes": 4,
        "copies": 1,
        "copied_bytes": 8,
        "readbacks": 1,
        "readback_bytes": 8,
    }
    assert {name: medians[name] for name in expected} == expected
    assert medians["ms"] > 0
    assert 0 < summary["per_token"]["create_ms"]["mean"] < summary["per_token"]["ms"]["mean"]
    assert summary["peak_bytes"]["activation"] == 2 * TENSORS * 64 * KIB
    assert summary["reusable_per_token"] == TENSORS
    assert found["summary"]["totals"]["creates"] == found["later"] == summary["totals"]["creates"]
    assert found["summary"]["costs"] == found["costs"]
    assert {row["bytes"] for row in found["costs"]["rows"]} == {16 * KIB, 64 * KIB}
    assert all(row["create_us"] > 0 for row in found["costs"]["rows"])
    path = tmp_path / "loop.trace"
    path.write_text(found["trace"], encoding="utf-8")
    counts = Counter(op for op, _, _ in read_trace(path))
    assert counts == {
        ACQUIRE: TOKENS * (TENSORS + 1),
        RELEASE: (TOKENS - 2) * TENSORS + TOKENS - 1,
        FLUSH: TOKENS * (TENSORS + 1),
        RUN: TOKENS - 1,
    }
    metadata = read_metadata(path)
    assert (metadata["attach"], metadata["runtime"], metadata["create_us"]) == (
        True, "a loop", found["costs"]["create_us"])  # fmt: skip
    assert metadata.get("pool", {}) == ({} if "policy" not in record else {
        "policy": "adaptive", "options": {}, "zero": "always"})  # fmt: skip
    assert found["events"] > TOKENS * 5 * TENSORS

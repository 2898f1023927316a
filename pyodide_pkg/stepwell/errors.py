"""Every error stepwell raises on purpose.

    StepwellError
    ├── DeviceError               the GPU side said no
    │   ├── NoWebGPU              no navigator.gpu, or no adapter
    │   ├── MissingCapability     a limit or feature the adapter does not have
    │   ├── DeviceLost            the device is gone; every handle died with it
    │   ├── OutOfMemory           the GPU has no room for a buffer
    │   ├── ShaderError           WGSL that does not compile (with its lines)
    │   └── UsageError            a call that breaks WebGPU's rules, or a stale or foreign handle
    ├── PoolError                 a request that the pool refuses, or one larger than the device allows
    │   ├── StaleBuffer           a lease that has ended (released twice, used after release) or is of another pool
    │   ├── BudgetExceeded        a hard budget of bytes leaves no room
    │   └── PolicyError           a policy that broke its contract
    ├── ModelError                the file cannot be decoded by this version
    │   ├── BadFile               truncated, corrupt or not a GGUF file
    │   └── Unsupported           well formed, but an architecture, type or tokenizer we do not have
    ├── BadTrace                  a recorded trace that is truncated, corrupt or of another version
    ├── ContextFull               the prompt or the answer does not fit the context
    └── BadRequest                a request (sampling, policy, KV mode, …) with a value out of range

A message states the numbers and the next step.  Python's own exceptions are for programming errors only.
"""


class StepwellError(Exception):
    """Root of the tree."""

    @property
    def code(self) -> str:
        """The stable name that the page and the harness see: that of the class."""
        return type(self).__name__


class DeviceError(StepwellError):
    """An error of the GPU side: the root of those that a ``Device`` raises."""


class NoWebGPU(DeviceError):
    """There is no ``navigator.gpu``, or it has no adapter."""


class MissingCapability(DeviceError):
    """A limit or feature that the adapter lacks: its ``name``, the value ``needed``, and what the adapter ``has``.

    ``advice`` ends the message.
    """

    def __init__(self, name: str, needed: object, has: object, advice: str = "") -> None:
        self.name, self.needed, self.has = name, needed, has
        text = f"{name}: {_number(needed)} needed, the adapter has {_number(has)}."
        super().__init__(f"{text} {advice}".rstrip())


class DeviceLost(DeviceError):
    """The device is gone: every handle and every lease on it is dead."""


class OutOfMemory(DeviceError):
    """The GPU has no room for a buffer."""


class ShaderError(DeviceError):
    """WGSL that does not compile; the message has the compiler's lines."""


class UsageError(DeviceError):
    """A call that breaks WebGPU's rules, or a handle that is stale or of another device."""


class PoolError(StepwellError):
    """A request that the pool refuses, or one larger than the device allows."""


class StaleBuffer(PoolError):
    """A lease that has ended (released twice, used after its release) or is of another pool."""


class BudgetExceeded(PoolError):
    """A hard ``budget`` has no room for ``requested`` bytes; also the bytes ``in_use``, ``in_flight`` and ``free``."""

    def __init__(self, message: str, *, requested: int, budget: int, in_use: int, in_flight: int, free: int) -> None:
        super().__init__(message)
        self.requested, self.budget, self.in_use = requested, budget, in_use
        self.in_flight, self.free = in_flight, free


class PolicyError(PoolError):
    """A policy that broke its contract."""


class ModelError(StepwellError):
    """A model file that this version cannot decode."""


class BadFile(ModelError):
    """A model file that is truncated, corrupt or not GGUF."""


class Unsupported(ModelError):
    """A well-formed model file with an architecture, type or tokenizer that this version does not have."""


class BadTrace(StepwellError):
    """A recorded trace that is truncated, corrupt or of another version."""


class ContextFull(StepwellError):
    """A prompt or an answer that does not fit the context."""


class BadRequest(StepwellError):
    """A request (sampling, policy, KV mode, …) with a value out of range."""


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

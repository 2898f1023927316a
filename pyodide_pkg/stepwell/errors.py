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
    """Root of the tree; ``code`` is the stable name that the page and the harness see."""

    @property
    def code(self) -> str:
        return type(self).__name__


class DeviceError(StepwellError):
    pass


class NoWebGPU(DeviceError):
    pass


class MissingCapability(DeviceError):
    """A limit or feature is missing: ``name`` of it, what is ``needed`` and what the adapter ``has``."""

    def __init__(self, name: str, needed: object, has: object, advice: str = "") -> None:
        self.name, self.needed, self.has = name, needed, has
        text = f"{name}: {_number(needed)} needed, the adapter has {_number(has)}."
        super().__init__(f"{text} {advice}".rstrip())


class DeviceLost(DeviceError):
    pass


class OutOfMemory(DeviceError):
    pass


class ShaderError(DeviceError):
    pass


class UsageError(DeviceError):
    pass


class PoolError(StepwellError):
    pass


class StaleBuffer(PoolError):
    pass


class BudgetExceeded(PoolError):
    """What was ``requested``, and the bytes of the moment: ``budget``, ``in_use``, ``in_flight``, ``free``."""

    def __init__(self, message: str, *, requested: int, budget: int, in_use: int, in_flight: int, free: int) -> None:
        super().__init__(message)
        self.requested, self.budget, self.in_use = requested, budget, in_use
        self.in_flight, self.free = in_flight, free


class PolicyError(PoolError):
    pass


class ModelError(StepwellError):
    pass


class BadFile(ModelError):
    pass


class Unsupported(ModelError):
    pass


class BadTrace(StepwellError):
    pass


class ContextFull(StepwellError):
    pass


class BadRequest(StepwellError):
    pass


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

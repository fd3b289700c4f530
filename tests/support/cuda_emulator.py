"""CUDA's memory model without a GPU: which work waits for which, told from what torch was asked to do.

Everything is computed on the CPU, at once and in the order in which it was asked for; what is emulated is the order
that CUDA guarantees. Each host thread and each stream has a vector clock (Mattern 1989): what it knows to be done.
An operator on memory of the device belongs to the current stream, which learns what the enqueuing thread knows;
a stream learns from another by an event, a thread from a stream by waiting for it. Two accesses of the same bytes,
one of them a write, of which the later does not know the earlier, are a fault. So is memory that is freed while
another stream than its own may use it: torch's allocator would hand it to its own stream at once, unless
`record_stream` told it.

Tensors are the device's if they were there before, come from those, or were made with an explicit `device`; else they
are the host's. A copy between the two that does not block is the stream's, one that blocks makes the thread wait.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from geotrain.kernels import dispatch

Clock = dict[str, int]  # timeline → how many of its operations are known to be done
# What the kernels, which torch does not see, write: positions of their arguments. All other tensors are read.
WRITES = {"quantize": {1, 4}, "dequantize": {1, 4}, "add_decoded": {2}, "adam": {0, 1, 2, 4}, "merge": {0, 1}}
WRITES |= {"rotate": {1}, "outer_update": {0, 2, 3}, "payload_ok": set()}
NO_ACCESS = ("aten::empty", "aten::resize", "aten::detach", "aten::lift", "aten::set_", "aten::new_empty")


@dataclass
class Timeline:
    """A stream or a host thread."""

    name: str
    clock: Clock = field(default_factory=dict)

    def learn(self, clock: Clock) -> None:
        for name, epoch in clock.items():
            self.clock[name] = max(epoch, self.clock.get(name, 0))

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


@dataclass(frozen=True)
class Access:
    begin: int  # bytes of the storage, [begin, end)
    end: int
    by: str
    epoch: int
    writes: bool
    where: str


@dataclass
class Memory:
    """A storage. home: the stream on which it was allocated; None: on none, or before. streams: that its free waits
    for."""

    alive: StorageWeakRef
    on_host: bool
    home: Timeline | None
    accesses: list[Access] = field(default_factory=list)
    streams: set[str] = field(default_factory=set)


class Stream(Timeline):
    """Stands for torch.cuda.Stream."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        super().__init__(name)
        self._cuda = cuda

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        with self._cuda.lock:
            self._cuda.collect()
            self.learn(event.clock)

    def record_event(self) -> Event:
        event = Event(self._cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """Stands for torch.cuda.Event."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.clock = cuda, Clock()

    def record(self, stream: Stream | None = None) -> None:
        with self._cuda.lock:
            stream = stream or self._cuda.current_stream()
            stream.learn(self._cuda.thread.clock)
            self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        with self._cuda.lock:
            self._cuda.collect()
            self._cuda.thread.learn(self.clock)


class Cuda:
    """Stands for torch.cuda. faults: what went wrong. syncs: where a host thread waited for a stream.

    only_on_cpu: functions of the product, by qualified name, that read a tensor where it is on a CPU only.
    """

    def __init__(self, *only_on_cpu: str) -> None:
        self._only_on_cpu = only_on_cpu
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self.syncs: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._local = threading.local()
        self._threads: list[Timeline] = []
        self._default, self._streams = Stream(self, "training"), 0

    def Stream(self, device: Any = None) -> Stream:
        self._streams += 1
        return Stream(self, f"stream {self._streams}")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._local, "stream", self._default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    @property
    def thread(self) -> Timeline:
        if not hasattr(self._local, "thread"):
            self._local.thread = Timeline(f"thread {threading.get_ident()}-{len(self._threads)}")
            self._threads.append(self._local.thread)
        return self._local.thread

    # -------------------------------------------------------------------------------------------- entering

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside it `torch.cuda` is this, and nothing is watched."""
        names = {name: getattr(self, name) for name in ("Stream", "Event", "current_stream", "stream")}
        names |= {"set_device": lambda device: None, "get_rng_state": lambda: torch.get_rng_state()}
        with mock.patch.multiple(torch.cuda, **names):
            yield

    @contextlib.contextmanager
    def emulated(self) -> Iterator[Cuda]:
        """Inside it `torch.cuda` is this, and whatever this thread does, and executors to which it gives jobs, is
        watched."""
        submit, result, exception = ThreadPoolExecutor.submit, Future.result, Future.exception
        rng_state = torch.get_rng_state
        cuda = self

        def submit_watched(pool: Any, job: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
            known, after = dict(cuda.thread.clock), Clock()

            def watched() -> Any:
                with cuda.lock:
                    cuda.thread.learn(known)
                with cuda._watched():
                    try:
                        return job(*args, **options)
                    finally:
                        after.update(cuda.thread.clock)

            future = submit(pool, watched)
            future.after = after  # type: ignore[attr-defined]
            return future

        def learned(ask: Callable[..., Any]) -> Callable[..., Any]:
            def asked(future: Any, timeout: float | None = None) -> Any:
                try:
                    return ask(future, timeout)
                finally:
                    with cuda.lock:
                        cuda.thread.learn(getattr(future, "after", {}))

            return asked

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            cuda.memory(tensor).streams.add(stream.name)

        def rng_state_on_host() -> Tensor:
            state = rng_state()
            cuda.on_host(state)
            return state

        def gathered_on_host(*args: Any, gather: Any = torch.distributed.all_gather_object, **options: Any) -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction():  # of objects, over gloo
                gather(*args, **options)

        watched = (
            (torch, "get_rng_state", rng_state_on_host),
            (torch.distributed, "all_gather_object", gathered_on_host),
            (ThreadPoolExecutor, "submit", submit_watched),
            (Future, "result", learned(result)),
            (Future, "exception", learned(exception)),
            (torch.Tensor, "record_stream", record_stream),
            (dispatch, "_pick", lambda *args, pick=dispatch._pick, **how: _WatchedKernels(cuda, pick(*args, **how))),
        )
        with self.in_place(), contextlib.ExitStack() as stack:
            for owner, name, stand_in in watched:
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            stack.enter_context(self._watched())
            yield self
        self.collect()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with _Functions(self), _Operators(self):
            yield

    # ---------------------------------------------------------------------------------------------- memory

    def memory(self, tensor: Tensor, on_host: bool = False, is_new: bool = False) -> Memory:
        """Look up the tensor's storage. on_host, is_new: of one that was not seen before."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            home = self.current_stream() if is_new and not on_host else None
            self._memories[key] = Memory(StorageWeakRef(storage), on_host, home)
        return self._memories[key]

    def on_host(self, *tensors: Tensor) -> None:
        """These tensors, which were there before, are the host's."""
        for tensor in tensors:
            self.memory(tensor, on_host=True)

    def collect(self) -> None:
        """Look for storages that were freed: their memory may be used again, by what their own stream does next."""
        with self.lock:
            for key, memory in list(self._memories.items()):
                if not memory.alive.expired():
                    continue
                del self._memories[key]
                if memory.home is None:
                    continue
                known = Timeline("", dict(memory.home.clock))
                for thread in self._threads:  # what any thread has seen the end of has ended
                    known.learn(thread.clock)
                for access in memory.accesses:
                    if access.by in memory.streams or access.by.startswith("thread"):
                        continue
                    if known.clock.get(access.by, 0) < access.epoch:
                        self.faults.append(
                            f"freed on {memory.home.name} while {access.by} may use it: {access.where}; record_stream"
                        )

    # ------------------------------------------------------------------------------------------ operations

    def operation(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], blocks: bool = False) -> None:
        """An operator on these tensors: the current stream's if one of them is on the device, else this thread's.
        blocks: whether the thread waits for its end."""
        accessed = [(t, False) for t in reads] + [(t, True) for t in writes]
        with self.lock:
            self.collect()
            on_device = any(not self.memory(t).on_host for t, _ in accessed)
            timeline = self.current_stream() if on_device else self.thread
            where = f"{name} at {_where()}"
            if on_device:
                timeline.learn(self.thread.clock)
            epoch = timeline.tick()
            for tensor, is_write in accessed:
                self._note(tensor, timeline, epoch, is_write, where)
            if on_device and blocks and not where.endswith(self._only_on_cpu):
                self.wait(where)

    def wait(self, where: str) -> None:
        """This thread waits for the current stream."""
        with self.lock:
            self.syncs.append(where)
            self.thread.learn(self.current_stream().clock)  # type: ignore[attr-defined]

    def _note(self, tensor: Tensor, timeline: Timeline, epoch: int, writes: bool, where: str) -> None:
        if not tensor.numel():
            return
        memory, size = self.memory(tensor), tensor.element_size()
        begin = tensor.storage_offset() * size
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end = begin + (sum((length - 1) * stride for length, stride in steps) + 1) * size
        kept = []
        for other in memory.accesses:
            if other.begin >= end or begin >= other.end:
                kept.append(other)
                continue
            if (writes or other.writes) and timeline.clock.get(other.by, 0) < other.epoch:
                self.faults.append(f"{timeline.name}: {where} does not wait for {other.by}: {other.where}")
            inside = begin <= other.begin and other.end <= end
            # What knows this access knows all that it replaces.
            if not (inside and (writes or (other.by == timeline.name and not other.writes))):
                kept.append(other)
        memory.accesses = [*kept, Access(begin, end, timeline.name, epoch, writes, where)]


class _Operators(TorchDispatchMode):
    """Tells the emulator of each operator."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, kwargs = self._cuda, kwargs or {}
        result = func(*args, **kwargs)
        name = func.name()
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        explicit = getattr(cuda._local, "explicit", False)
        on_host = all(cuda.memory(t).on_host for t in given) and not (explicit and not given)
        written = []
        for argument, value in [*zip(func._schema.arguments, args, strict=False)] + [
            (a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs
        ]:
            if name.startswith("c10d::") or (argument.alias_info is not None and argument.alias_info.is_write):
                written += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not func.is_view:
            for tensor in made:
                cuda.memory(tensor, on_host, is_new=True)
        if func.is_view or name.startswith(NO_ACCESS):
            return result
        ids = {id(t) for t in written}
        reads = [t for t in given if id(t) not in ids]
        to_host = name.startswith("aten::copy_") and cuda.memory(args[0]).on_host
        blocks = "_local_scalar_dense" in name or (to_host and not (len(args) > 2 and args[2]))
        fresh = [t for t in made if id(t) not in {id(g) for g in given}]
        cuda.operation(name, reads, [*written, *fresh], blocks)
        return result


class _Functions(TorchFunctionMode):
    """Watches what only the Python call shows: an explicit device, and tensors that are read without an operator."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda, kwargs, name = self._cuda, kwargs or {}, getattr(func, "__name__", "")
        if func is torch.Tensor.to:
            target = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.device)), None)
            if target is not None and cuda.memory(args[0]).on_host:
                return self._moved(args[0], on_host=False, blocks=not kwargs.get("non_blocking"))
        if func is torch.Tensor.cpu and not cuda.memory(args[0]).on_host:
            return self._moved(args[0], on_host=True, blocks=True)
        if (
            func in (torch.tensor, torch.as_tensor)
            and kwargs.get("device") is not None
            and not torch.is_tensor(args[0])
        ):
            cuda.wait(f"{name} at {_where()}")  # it copies from memory that is not pinned
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            # An array's elements can be written, too.
            cuda.operation(name, *(([], [args[0]]) if func is torch.Tensor.numpy else ([args[0]], [])), blocks=True)
            if func is torch.Tensor.numpy and not cuda.memory(args[0]).on_host:
                cuda.faults.append(f"numpy of a tensor on the device at {_where()}")
        before, cuda._local.explicit = getattr(cuda._local, "explicit", False), kwargs.get("device") is not None
        try:
            return func(*args, **kwargs)
        finally:
            cuda._local.explicit = before

    def _moved(self, tensor: Tensor, on_host: bool, blocks: bool) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            moved = tensor.detach().clone()
        self._cuda.memory(moved, on_host, is_new=True)
        self._cuda.operation("copy between host and device", [tensor], [moved], blocks)
        return moved


class _WatchedKernels:
    """The kernels, which work on raw memory: an operator each."""

    def __init__(self, cuda: Cuda, kernels: Any) -> None:
        self._cuda, self._kernels = cuda, kernels

    def __getattr__(self, name: str) -> Any:
        def watched(*args: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                result = getattr(self._kernels, name)(*args)
            tensors = {i: t for i, t in enumerate(args) if isinstance(t, Tensor)}
            on_host = all(self._cuda.memory(t).on_host for t in tensors.values())
            made = [result] if isinstance(result, Tensor) else []
            for tensor in made:
                self._cuda.memory(tensor, on_host, is_new=True)
            reads = [t for i, t in tensors.items() if i not in WRITES[name]]
            writes = [t for i, t in tensors.items() if i in WRITES[name]]
            self._cuda.operation(name, reads, [*writes, *made])
            return result

        return watched


def _where() -> str:
    """The innermost line of the product that called a kernel or torch. Modules are told by their names, wherever the
    tree lies; the kernels' own frames say nothing of who reads or writes."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("geotrain.") and not module.startswith("geotrain.kernels."):
            return f"{module}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside"

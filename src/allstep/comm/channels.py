"""A second line between the ranks of a group: what goes over the one never pairs with what goes over the other.

gloo pairs collectives by their order. Buckets leave as gradients come, which may be in another order on each rank than the
collectives of the model itself, such as those of a synchronised batch norm: on one line a bucket is then summed with
statistics, silently where the sizes agree (test_channels.py).

Only a group that is gloo on all its devices gets one. Elsewhere one more communicator costs memory of the device.
"""

import atexit
import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from allstep.comm.forking import wait_for_quiet_threads
from allstep.comm.shm import ShmProcessGroup

__all__ = ["can_have_channel", "channel_of", "let_go_of_channels", "opened_channel"]


@dataclass
class _Opened:
    """A channel, and what is needed to give it the timeout that its group has."""

    carrier: dist.ProcessGroup | None
    """None where none could be made."""
    gloo: Any = None
    device: Any = None
    timeout: Any = None


# By the group whose ranks they join. Both ends are let go with that group: nothing in here holds it, and a channel holds no
# more of it than its store.
_CHANNELS: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Opened]" = weakref.WeakKeyDictionary()
_MADE_BY: set[int] = set()


def can_have_channel(group: dist.ProcessGroup) -> bool:
    """Whether `group` is of a kind that gets a channel: equal on all its ranks."""
    if isinstance(group, ShmProcessGroup) and group.peers is not None:
        return True
    return type(group) in (dist.ProcessGroup, ShmProcessGroup) and group.size() > 1 and _gloo_of(group) is not None


def opened_channel(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group that carries the channel of `group`, with the timeout that `group` has now; `group` where it got none.

    None where nobody has asked for it before: see `channel_of`.
    """
    if isinstance(group, ShmProcessGroup) and group.peers is not None:
        return group.opened_channel
    opened = _CHANNELS.get(group)
    if opened is None:
        return None
    if opened.carrier is None:
        return group
    timeout = group._get_backend(opened.device).options._timeout
    if timeout != opened.timeout:
        opened.gloo._set_default_timeout(timeout)
        opened.timeout = timeout
    return opened.carrier


def channel_of(group: dist.ProcessGroup, gather: Callable[[Any], list[Any]]) -> dist.ProcessGroup:
    """The group that carries the channel of `group`; `group` itself where none can be made. Collective, the first time.

    Args:
        group: one that `can_have_channel`.
        gather: every rank's value, by rank, over `group`.
    """
    carrier = opened_channel(group)
    if carrier is not None:
        return carrier
    if isinstance(group, ShmProcessGroup) and group.peers is not None:
        return group.open_channel()
    # A store may hold what an earlier group of the same name left there, so each channel has a name that none had before.
    name = gather(uuid.uuid4().hex)[0]
    opened, reason = _Opened(None), ""
    try:
        opened = _connected(group, name)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    if any(gather(reason)):
        opened = _Opened(None)  # on all ranks, so that they go on alike
    _CHANNELS[group] = opened
    if os.getpid() not in _MADE_BY:
        _MADE_BY.add(os.getpid())
        atexit.register(_let_go_at_exit)
    return opened.carrier or group


def let_go_of_channels() -> None:
    """Forget all channels, so that their threads end. One that is used again is made anew."""
    _CHANNELS.clear()


def _let_go_at_exit() -> None:
    if os.getpid() in _MADE_BY:  # a forked process has none of the threads that it would wait for
        wait_for_quiet_threads()  # those of a group that is not destroyed, too: one that enters the interpreter later aborts
        let_go_of_channels()


def _connected(group: dist.ProcessGroup, name: str) -> _Opened:
    """A group of the ranks and devices of `group`, over connections of its own on the same network interfaces."""
    gloo = _gloo_of(group)
    assert gloo is not None
    options = type(gloo.options)()
    for attribute in ("_devices", "_threads"):
        setattr(options, attribute, getattr(gloo.options, attribute))
    # half of it, so that a rank that gives up still finds those who could not even begin, and who wait for it in `channel_of`
    options._timeout = gloo.options._timeout / 2
    store = PrefixStore(f"allstep/channel/{name}/", group.get_group_store())
    channel = dist.ProcessGroup(store, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), options)
    for device in group._device_types:
        channel._register_backend(device, dist.ProcessGroup.BackendType.GLOO, backend)
    channel._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend._set_default_timeout(gloo.options._timeout)
    return _Opened(channel, backend, group._device_types[0], gloo.options._timeout)


def _gloo_of(group: dist.ProcessGroup) -> Any:
    """The one gloo backend that carries all collectives of `group`; None where another one carries some."""
    kind = getattr(dist, "ProcessGroupGloo", None)
    backends = {id(backend): backend for backend in (group._get_backend(device) for device in group._device_types)}
    if kind is None or len(backends) != 1:
        return None
    (backend,) = backends.values()
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, kind) else None

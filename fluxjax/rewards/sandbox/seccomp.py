"""The system calls that code in a sandbox may not make, as a program of the kernel's classic BPF (seccomp(2), bpf(4)).

The filter refuses namespaces, mounts, keys of the kernel, tracing, loading of kernel modules, and memory that no limit
counts: memfd, System V objects, queues of inotify, and buffers of sockets. `socketpair(AF_UNIX)` is allowed, because
event loops need it; other sockets are refused. `setsockopt` is refused because it could enlarge a buffer, and `bind`
because many sockets could send to one socket that has a name, and fill its buffer. `clone` is refused only with flags
of namespaces. As filters cannot read its flags, `clone3` fails with ENOSYS, and the C library uses `clone`.
"""

import errno
import platform
import re
import socket
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data` on little-endian machines
_NAMESPACES = 0x7E020080  # CLONE_NEW* of namespaces(7): time, mount, cgroup, uts, ipc, user, pid, net
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # requests that type into the run's terminal
_X32 = 0x40000000  # the least number of a call of x32, another interface of x86_64
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's numbers (linux/audit.h)
_CLONE, _IOCTL, _SOCKETPAIR, _CLONE3 = (56, 220), (16, 29), (53, 199), 435
_CALLS = """
    unshare 272 97, setns 308 268
    mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, move_mount 429 429
    fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, open_tree_attr 467 467
    open_by_handle_at 304 265, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271
    add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282
    io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
    kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106
    reboot 169 142, swapon 167 224, swapoff 168 225
    memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190
    inotify_init 253 26, inotify_init1 294 26, fanotify_init 300 262
    socket 41 198, bind 49 200, connect 42 203, setsockopt 54 208"""
# The numbers of each refused call on x86_64 and aarch64, which has only `inotify_init1`.
_REFUSED = {name: (int(x86_64), int(aarch64)) for name, x86_64, aarch64 in re.findall(r"(\w+) (\d+) (\d+)", _CALLS)}


def program(machine: str | None = None) -> bytes:
    """Returns the filter for `bwrap --seccomp`, by default for this machine. Raises ValueError if it is unknown."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"no filter of system calls for {machine}; there are some for {', '.join(_MACHINES)}")
    column = list(_MACHINES).index(machine)
    no, unknown = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_if(_AT_LEAST, _X32, unknown),
        *_if(_EQUAL, _CLONE3, unknown),
    ]
    for numbers in _REFUSED.values():
        steps += _if(_EQUAL, numbers[column], no)
    steps += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST),
        *_if(_ANY_BIT, _NAMESPACES, no),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 4, _SOCKETPAIR[column]),
        (_LOAD, 0, 0, _FIRST),
        (_EQUAL, 1, 0, socket.AF_UNIX),
        (_RETURN, 0, 0, no),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 5, _IOCTL[column]),
        (_LOAD, 0, 0, _SECOND),
        *_if(_EQUAL, _TIOCSTI, no),
        *_if(_EQUAL, _TIOCLINUX, no),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _if(test: int, value: int, verdict: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, verdict)]

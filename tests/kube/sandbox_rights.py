"""Rights of a container's process: user, groups, capabilities, no_new_privs, seccomp. Applied just before exec.

Only the standard library, and no more of it than is needed: this runs before every container of the tests.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Any

PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = 63

# The set that container runtimes leave to a root process.
CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}

# Call numbers that the RuntimeDefault profiles of container runtimes deny: x86_64, aarch64.
DENIED_CALLS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
CLONE = (56, 220)
CLONE3 = 435
CLONE_NEWUSER = 0x10000000
AUDIT_ARCH = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
EPERM, ENOSYS = 1, 38

LOAD, JUMP_EQUAL, JUMP_SET, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_FIRST_ARGUMENT = 0, 4, 16
X32_BIT = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def apply(rights: dict[str, Any]) -> None:
    """Give up everything that `rights` does not name. Keys: uid, gid, groups, capabilities, seccomp,
    no_new_privs. Raises OSError if the kernel refuses any part."""
    kept = {CAPABILITIES[name] for name in rights["capabilities"]}
    _drop_bounding_set(kept)
    if rights["seccomp"]:
        # Before the user changes: without no_new_privs a filter needs CAP_SYS_ADMIN.
        _install_seccomp()
    os.setgroups(rights["groups"])
    os.setresgid(rights["gid"], rights["gid"], rights["gid"])
    os.setresuid(rights["uid"], rights["uid"], rights["uid"])
    _set_capabilities(kept if rights["uid"] == 0 else set())
    if rights["no_new_privs"]:
        _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *padded) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _drop_bounding_set(kept: set[int]) -> None:
    for capability in range(LAST_CAPABILITY + 1):
        # The kernel answers EINVAL above the last capability that it knows.
        if capability not in kept and _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break


def _set_capabilities(kept: set[int]) -> None:
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    low = sum(1 << capability for capability in kept if capability < 32)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    # effective, permitted, inheritable; the second triple holds capabilities 32 and up, of which none is kept.
    data = ctypes.create_string_buffer(struct.pack("=6I", low, low, 0, 0, 0, 0))
    if _libc.capset(header, data) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"capset: {os.strerror(error)}")


def _install_seccomp() -> None:
    program = seccomp_program(platform.machine())
    code = ctypes.create_string_buffer(program)
    # struct sock_fprog {unsigned short len; struct sock_filter *filter;}
    header = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def seccomp_program(machine: str) -> bytes:
    """The filter as classic BPF: denied calls fail with EPERM, everything else is allowed.

    Raises OSError on a machine whose call numbers are not known here.
    """
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"no seccomp profile for {machine}")
    arch, column = AUDIT_ARCH[machine]

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    deny, refuse = step(RETURN, ERRNO | EPERM), step(RETURN, ERRNO | ENOSYS)
    program = [step(LOAD, OFFSET_ARCH), step(JUMP_EQUAL, arch, 1, 0), deny, step(LOAD, OFFSET_NUMBER)]
    program += [step(JUMP_GREATER_EQUAL, X32_BIT, 0, 1), deny]
    for numbers in DENIED_CALLS.values():
        program += [step(JUMP_EQUAL, numbers[column], 0, 1), deny]
    # clone3 hides its flags from a filter; ENOSYS makes the C library fall back to clone.
    program += [step(JUMP_EQUAL, CLONE3, 0, 1), refuse]
    program += [step(JUMP_EQUAL, CLONE[column], 0, 3), step(LOAD, OFFSET_FIRST_ARGUMENT)]
    program += [step(JUMP_SET, CLONE_NEWUSER, 0, 1), deny, step(RETURN, ALLOW)]
    return b"".join(program)

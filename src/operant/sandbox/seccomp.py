"""The system calls that a program may make, as a filter in the kernel's BPF (seccomp(2)).

An allow-list: what it leaves out is refused with "operation not permitted", whatever a later kernel adds. Left out are
other processes (fork, execve, ptrace, signals to others), the network (socket; a pair of connected ends is allowed),
other rights (setuid, chmod, chown, mount, namespaces, keys), locks of files, memory that no limit counts (memfd, shared
memory, larger buffers of sockets, descriptors that travel through them), and what has a record of holes in kernels
(io_uring, bpf, also the classic one by setsockopt, userfaultfd, perf events). Written by hand, for two machines,
because libseccomp is not everywhere; a test holds the numbers to those of libseccomp.
"""

import errno
import platform
import struct
import sys

SELF = 0x5E1F5E1F
"""Stands for the pid of the program, which the harness knows."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of <linux/audit.h>."""

_FREE = """
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 open 2 - openat 257 56 close 3 57
close_range 436 436 stat 4 - fstat 5 80 lstat 6 - newfstatat 262 79 statx 332 291 statfs 137 43 fstatfs 138 44
access 21 - faccessat 269 48 faccessat2 439 439 readlink 89 - readlinkat 267 78 getdents 78 - getdents64 217 61
lseek 8 62 getcwd 79 17 chdir 80 49 fchdir 81 50 mkdir 83 - mkdirat 258 34 rmdir 84 - rename 82 - renameat 264 38
renameat2 316 276 unlink 87 - unlinkat 263 35 link 86 - linkat 265 37 symlink 88 - symlinkat 266 36 truncate 76 45
ftruncate 77 46 fsync 74 82 fdatasync 75 83 fadvise64 221 223 sendfile 40 71 copy_file_range 326 285
dup 32 23 dup2 33 - dup3 292 24 pipe 22 - pipe2 293 59 select 23 - pselect6 270 72 poll 7 - ppoll 271 73
epoll_create 213 - epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 - epoll_pwait 281 22 eventfd2 290 19
mmap 9 222 munmap 11 215 mprotect 10 226 mremap 25 216 brk 12 214 madvise 28 233 mincore 27 232 msync 26 227
rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136 rt_sigsuspend 130 133
rt_sigtimedwait 128 137 sigaltstack 131 132 pause 34 - alarm 37 - getitimer 36 102 setitimer 38 103
restart_syscall 219 128 futex 202 98 set_robust_list 273 99 get_robust_list 274 100 set_tid_address 218 96 rseq 334 293
membarrier 324 283 arch_prctl 158 - sched_yield 24 124 sched_getaffinity 204 123 exit 60 93 exit_group 231 94
wait4 61 260 waitid 247 95 clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115 nanosleep 35 101
gettimeofday 96 169 time 201 - times 100 153 getrusage 98 165 sysinfo 99 179 uname 63 160 getrandom 318 278
getrlimit 97 163 umask 95 166 getpid 39 172 getppid 110 173 gettid 186 178 getpgrp 111 - getpgid 121 155 getsid 124 156
getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getresuid 118 148 getresgid 120 150
getpriority 140 141 capget 125 90 getcpu 309 168 recvfrom 45 207 sendto 44 206 recvmsg 47 212
shutdown 48 210 getsockopt 55 209 getsockname 51 204 getpeername 52 205
"""
_LIMITED = """
clone 56 220 clone3 435 435 kill 62 129 tgkill 234 131 socketpair 53 199 prctl 157 167 prlimit64 302 261 ioctl 16 29
openat2 437 437 fcntl 72 25
"""

ALLOW, KILL = 0x7FFF0000, 0x80000000
_LOAD, _EQUAL, _BITS, _RETURN, _AND = 0x20, 0x15, 0x45, 0x06, 0x54


def numbers(machine: str) -> dict[str, int]:
    """The calls that the filter knows, by name, with their numbers on the machine."""
    words = (_FREE + _LIMITED).split()
    column = 1 + list(ARCHITECTURES).index(machine)
    return {words[i]: int(words[i + column]) for i in range(0, len(words), 3) if words[i + column] != "-"}


def refusal(number: int) -> int:
    return 0x00050000 | number


def rules() -> dict[str, list[tuple[int, int, int, int]]]:
    """What is asked of the arguments of the calls that are allowed with some of them alone."""

    def argument(index: int) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, 16 + 8 * index)  # the lower half, which is what the kernel looks at in these

    def one_of(*values: int, otherwise: int = errno.EPERM) -> list[tuple[int, int, int, int]]:
        tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        return [*tests, (_RETURN, 0, 0, refusal(otherwise)), (_RETURN, 0, 0, ALLOW)]

    new_namespaces, thread = 0x7E020000, 0x00010000
    return {
        # A thread, and no process.
        "clone": [argument(0), (_BITS, 1, 0, new_namespaces), (_BITS, 1, 0, thread), *one_of()],
        "clone3": [(_RETURN, 0, 0, refusal(errno.ENOSYS))],  # its flags cannot be seen: C libraries fall back on clone
        "openat2": [(_RETURN, 0, 0, refusal(errno.ENOSYS))],
        "kill": [argument(0), *one_of(SELF)],
        "tgkill": [argument(0), *one_of(SELF)],
        "prlimit64": [argument(0), *one_of(0)],
        "prctl": [argument(0), *one_of(15, 16)],  # the name of a thread
        # AF_UNIX and SOCK_STREAM: ends of another kind could be sent to an address.
        "socketpair": [argument(0), *one_of(1)[:-1], argument(1), (_AND, 0, 0, 0xF), *one_of(1)],
        # No signals on input (F_SETOWN), which reach other processes, and no locks (F_SETLK and others), which other
        # processes wait for. FIOSETOWN is one of ioctl.
        "fcntl": [argument(1), *one_of(0, 1, 2, 3, 4, 1030, otherwise=errno.EINVAL)],
        "ioctl": [argument(1), *one_of(0x5421, 0x5450, 0x5451, 0x541B, otherwise=errno.ENOTTY)],
    }


def program(machine: str | None = None) -> bytes | None:
    """The filter for this machine, or the one named; None if it is not written for it."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES or (sys.platform, sys.byteorder) != ("linux", "little"):
        return None
    limited = rules()
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, ARCHITECTURES[machine]), (_RETURN, 0, 0, KILL), (_LOAD, 0, 0, 0)]
    for name, number in numbers(machine).items():
        then = limited.get(name, [(_RETURN, 0, 0, ALLOW)])
        code += [(_EQUAL, 0, len(then), number), *then]
    code.append((_RETURN, 0, 0, refusal(errno.EPERM)))
    return b"".join(struct.pack("HBBI", *line) for line in code)

# G 84: every system call that is refused by name
# expect: status=ok
# needs: seccomp x86_64
import errno

from attack import attempt, syscall, tell

NUMBERS = """
    ptrace 101 process_vm_readv 310 process_vm_writev 311 process_madvise 440 process_mrelease 448 kcmp 312 pidfd_getfd 438 mount 165
    umount2 166 pivot_root 155 chroot 161 fsopen 430 fsmount 432 fsconfig 431 fspick 433 move_mount 429 open_tree 428
    mount_setattr 442 unshare 272 setns 308 setgroups 116 capset 126 sethostname 170 setdomainname 171 bpf 321 perf_event_open 298
    userfaultfd 323 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 keyctl 250 add_key 248 request_key 249
    fanotify_init 300 fanotify_mark 301 inotify_init 253 inotify_init1 294 inotify_add_watch 254 inotify_rm_watch 255
    name_to_handle_at 303 open_by_handle_at 304 shmget 29 shmat 30 shmctl 31 shmdt 67 semget 64 semop 65 semctl 66 semtimedop 220
    msgget 68 msgsnd 69 msgrcv 70 msgctl 71 mq_open 240 mq_unlink 241 mq_timedsend 242 mq_timedreceive 243 mq_notify 244
    mq_getsetattr 245 vmsplice 278 splice 275 tee 276 memfd_secret 447 mlockall 151 munlockall 152 mlock2 325 personality 135
    sched_setaffinity 203 sched_setscheduler 144 sched_setattr 314 sched_setparam 142 ioprio_set 251 setpriority 141
    clock_settime 227 clock_adjtime 305 settimeofday 164 adjtimex 159 kexec_load 246 kexec_file_load 320 init_module 175
    finit_module 313 delete_module 176 reboot 169 swapon 167 swapoff 168 acct 163 syslog 103 quotactl 179 quotactl_fd 443 iopl 172
    ioperm 173 modify_ldt 154 migrate_pages 256 move_pages 279 landlock_create_ruleset 444 landlock_add_rule 445
    landlock_restrict_self 446 seccomp 317 vhangup 153 nfsservctl 180 lookup_dcookie 212 set_mempolicy_home_node 450 setxattr 188
    lsetxattr 189 fsetxattr 190 removexattr 197 lremovexattr 198 fremovexattr 199 sync 162 syncfs 306
""".split()
for name, number in zip(NUMBERS[::2], map(int, NUMBERS[1::2])):
    attempt(name, syscall, number, 0, 0, 0, 0, 0, 0, by=[errno.EPERM])
# Not on any list, or on one only where the headers know it: obsolete ones, newer ones, those of later kernels.
for number in (
    134,
    156,
    174,
    177,
    178,
    181,
    182,
    183,
    184,
    185,
    236,
    457,
    458,
    459,
    460,
    461,
    463,
    464,
    465,
    466,
    467,
    468,
    500,
    999,
):
    attempt(number, syscall, number, 0, 0, 0, 0, 0, 0, by=[errno.ENOSYS, errno.EPERM])
tell()

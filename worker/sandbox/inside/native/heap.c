/* Where the warm interpreter's memory lies. Forking costs by the page and by the mapping: page tables are copied, each page that
 * a child writes faults once, each piece of program text that it first reads faults once, and all of it is torn down again.
 *
 *   heap_init    before the imports: Python's objects go to huge pages
 *   heap_settle  after them: fewer mappings, the interpreter's text on huge pages too; what a program allocates itself lies on
 *                small pages again, since a huge page would be cleared as a whole for its first byte, and close together: what
 *                malloc gives here, and Python's objects in nursery.c
 *
 * All of it is a wish: where the kernel says no, everything works and costs more. */
#define _GNU_SOURCE
#include "heap.h"
#include <Python.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE ((uintptr_t)2 << 20)
#define ARENA_BYTES ((size_t)1 << 20) /* of Python 3.10 and later */
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33)
#define HAS_MALLINFO2
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static char *block, *next_arena, *block_end;
static void *given_back; /* arenas, each holding the address of the next one */
static PyObjectArenaAllocator usual;

static uintptr_t round_up(uintptr_t address) { return (address + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1); }

/* Arenas of objects are all of one size; Python also takes pieces of its own stack from here, which come and go. */
static int is_arena(size_t size) { return size == ARENA_BYTES; }

static void *arena_alloc(void *context, size_t size) {
    if (!is_arena(size))
        return usual.alloc(context, size);
    if (given_back) {
        void *arena = given_back;
        given_back = *(void **)arena;
        return arena;
    }
    if ((size_t)(block_end - next_arena) >= size) {
        char *arena = next_arena;
        next_arena += size;
        return arena;
    }
    return usual.alloc(context, size);
}

static void arena_free(void *context, void *arena, size_t size) {
    if ((char *)arena < block || (char *)arena >= block_end) {
        usual.free(context, arena, size);
        return;
    }
    *(void **)arena = given_back; /* unmapping would split the huge page */
    given_back = arena;
}

int heap_init(size_t most) {
    char *raw = mmap(NULL, most + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return -1;
    block = next_arena = (char *)round_up((uintptr_t)raw);
    block_end = block + most;
    madvise(block, most, MADV_HUGEPAGE);
    PyObject_GetArenaAllocator(&usual);
    PyObjectArenaAllocator ours = {usual.ctx, arena_alloc, arena_free};
    PyObject_SetArenaAllocator(&ours);
    return 0;
}

struct mapping {
    uintptr_t start, end;
    char rights[5];
    char file[256];
};

static int read_mappings(struct mapping *all, int most) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    int count = 0;
    while (maps && count < most && fgets(line, sizeof line, maps)) {
        struct mapping *m = &all[count];
        m->file[0] = 0;
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %255s", &m->start, &m->end, m->rights, m->file) >= 3)
            count++;
    }
    if (maps)
        fclose(maps);
    return count;
}

static int joined(struct mapping *a, struct mapping *b) { return a->file[0] == '/' && a->end == b->start && !strcmp(a->file, b->file); }

static int has(struct mapping *m, const char *rights) { return !strncmp(m->rights, rights, 3); }

/* Neighbours of one file that differ only in their rights become one mapping, in two passes; the other order joins fewer.
 * It takes nothing from the sandbox: a program may map what it likes anyway. */
static void join_mappings(struct mapping *all, int most) {
    int count = read_mappings(all, most);
    for (int i = 0; i + 1 < count; i++)
        if (joined(&all[i], &all[i + 1]) && has(&all[i], "r--") && has(&all[i + 1], "rw-"))
            mprotect((void *)all[i].start, all[i].end - all[i].start, PROT_READ | PROT_WRITE);
    count = read_mappings(all, most);
    for (int i = 0; i < count; i++) {
        int before = i > 0 && joined(&all[i - 1], &all[i]) && has(&all[i - 1], "r-x");
        int after = i + 1 < count && joined(&all[i], &all[i + 1]) && has(&all[i + 1], "r-x");
        if (has(&all[i], "r--") && (before || after))
            mprotect((void *)all[i].start, all[i].end - all[i].start, PROT_READ | PROT_EXEC);
    }
}

/* The mapping that holds the interpreter's text is replaced by an anonymous copy of itself at the same address: children then
 * inherit its page tables instead of faulting it in piece by piece (-45 faults, -10 %). */
static void copy_text(struct mapping *all, int most) {
    uintptr_t inside = (uintptr_t)&PyObject_Malloc;
    int count = read_mappings(all, most);
    for (int i = 0; i < count; i++) {
        struct mapping *m = &all[i];
        if (inside < m->start || inside >= m->end || !has(m, "r-x"))
            continue;
        size_t size = m->end - m->start;
        char *raw = mmap(NULL, size + 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (raw == MAP_FAILED)
            return;
        char *copy = (char *)(round_up((uintptr_t)raw) + m->start % HUGE_PAGE); /* so that huge pages can move as they are */
        madvise(copy, size, MADV_HUGEPAGE);
        memcpy(copy, (void *)m->start, size);
        if (!mprotect(copy, size, PROT_READ | PROT_EXEC))
            mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)m->start);
        munmap(raw, size + 2 * HUGE_PAGE); /* what is left around and under the copy */
        madvise((void *)m->start, size, MADV_COLLAPSE);
        return;
    }
}

/* Of a file's mapping a child inherits the page tables only if some page in it is private. One byte is written over itself, through
 * the file that may do so whatever the rights: children then have the C library's text without a fault (-20). */
static void inherit_text(struct mapping *all, int most) {
    const uintptr_t inside[] = {(uintptr_t)&getpid, (uintptr_t)_r_debug.r_ldbase};
    int memory = open("/proc/self/mem", O_WRONLY | O_CLOEXEC), count = read_mappings(all, most);
    for (int i = 0; memory >= 0 && i < count; i++)
        for (size_t k = 0; k < sizeof inside / sizeof *inside; k++)
            if (inside[k] >= all[i].start && inside[k] < all[i].end && has(&all[i], "r-x"))
                (void)!pwrite(memory, (void *)all[i].start, 1, (off_t)all[i].start);
    if (memory >= 0)
        close(memory);
}

static void collapse_heaps(struct mapping *all, int most) {
    int count = read_mappings(all, most);
    for (int i = 0; i < count; i++) {
        uintptr_t start = round_up(all[i].start), end = all[i].end & ~(HUGE_PAGE - 1);
        if (has(&all[i], "rw-") && (!all[i].file[0] || !strcmp(all[i].file, "[heap]")) && start < end)
            madvise((void *)start, end - start, MADV_COLLAPSE);
    }
}

/* Malloc's gaps between what the imports have left are taken, for good: whatever a child asks for lies at the end, close together
 * (-15 faults). */
static void close_gaps(struct mapping *all, int most) {
#ifdef HAS_MALLINFO2
    mallopt(M_TOP_PAD, 1 << 20);
    uintptr_t end = (uintptr_t)sbrk(0) - mallinfo2().keepcost;
    int count = read_mappings(all, most);
    for (int i = 0; i < count; i++)
        for (size_t size = (64 << 10) + 8; !strcmp(all[i].file, "[heap]") && size >= 24; size -= 16) {
            uintptr_t p;
            while ((p = (uintptr_t)malloc(size)) >= all[i].start && p < end)
                ;
            free((void *)p);
        }
#else
    (void)all, (void)most;
#endif
}

void heap_settle(void) {
    enum { MOST = 8192 };
    char *used_end = (char *)round_up((uintptr_t)next_arena);
    if (used_end < block_end)
        munmap(used_end, (size_t)(block_end - used_end));
    block_end = next_arena;
    struct mapping *all = mmap(NULL, MOST * sizeof *all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return;
    join_mappings(all, MOST);
    copy_text(all, MOST);
    inherit_text(all, MOST);
    collapse_heaps(all, MOST);
    close_gaps(all, MOST);
    munmap(all, MOST * sizeof *all);
}

/* Puts the warm interpreter's memory on huge pages. A fork costs time per page and per mapping: the kernel copies page
 * tables, each page that a child writes faults once, each piece of text that it first reads faults once, and all of it is
 * torn down again.
 *
 *   huge_pages_init      before the imports: Python's objects go to huge pages
 *   huge_pages_settle    after the imports: fewer mappings, libraries on huge pages too. A program's own allocations come
 *                        from small pages (the kernel would clear a whole huge page for the first byte), close
 *                        together: malloc's here, Python's objects in small_objects.c
 *   huge_pages_collapse  every few hundred forks: restores the huge pages that this process split by writing to them
 *
 * All of it is optional: where the kernel refuses, everything works and costs more. */
#include "zygote.h"
#include <Python.h>
#include <malloc.h>

#define HUGE_PAGE ((uintptr_t)2 << 20)
#define ARENA_BYTES ((size_t)1 << 20) /* of Python 3.10 and later */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static char *block, *next_arena, *block_end;
static void *free_arenas; /* free arenas; each holds the address of the next one */
static PyObjectArenaAllocator usual;

static uintptr_t round_down(uintptr_t address) { return address & ~(HUGE_PAGE - 1); }
static uintptr_t round_up(uintptr_t address) { return (address + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1); }

static void *arena_alloc(void *context, size_t size) {
    if (size != ARENA_BYTES) /* a chunk of Python's own stack; these come and go */
        return usual.alloc(context, size);
    if (free_arenas) {
        void *arena = free_arenas;
        free_arenas = *(void **)arena;
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
    *(void **)arena = free_arenas; /* unmapping would split the huge page */
    free_arenas = arena;
}

int huge_pages_init(size_t most) {
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
    int is_special; /* must not be replaced by a copy */
};

/* Wiped or not copied by fork (libc's getrandom state), droppable, locked, or of a device. */
static int has_special_flag(const char *flags) {
    for (const char *const *flag = (const char *const[]){" wf", " dc", " dp", " lo", " io", " pf", NULL}; *flag; flag++)
        if (strstr(flags, *flag))
            return 1;
    return 0;
}

static int read_mappings(struct mapping *all, int most) {
    FILE *maps = fopen("/proc/self/smaps", "re");
    char line[512];
    int count = 0;
    while (maps && count < most && fgets(line, sizeof line, maps)) {
        struct mapping *m = &all[count];
        m->file[0] = 0;
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %255s", &m->start, &m->end, m->rights, m->file) >= 3)
            m->is_special = 0, count++;
        else if (count && !strncmp(line, "VmFlags:", 8))
            m[-1].is_special = has_special_flag(line);
    }
    if (maps)
        fclose(maps);
    return count < most ? count : 0; /* a truncated list does not show the free ranges */
}

#define MAX_COPIED_BYTES (4 * HUGE_PAGE) /* larger mappings stay: every zygote would hold a copy */
#define MAX_LIBRARY_BYTES HUGE_PAGE      /* all zygotes share the pages of a file */
#define MIN_EDGE_BYTES (HUGE_PAGE / 2)  /* from here on a row is extended to a full huge page */

static int is_library(struct mapping *m) { return m->file[0] == '/'; }

static int is_malloc_heap(struct mapping *m) { return !strcmp(m->file, "[heap]"); }

static int is_small_heap(struct mapping *m) {
    return !m->file[0] && (m->end <= (uintptr_t)block || m->start >= (uintptr_t)block_end);
}

static int can_be_copied(struct mapping *m, const char *interpreter) {
    size_t size = m->end - m->start;
    int is_right = is_malloc_heap(m) || (is_library(m) && (size <= MAX_LIBRARY_BYTES || !strcmp(m->file, interpreter))) ||
                   (is_small_heap(m) && size <= MAX_COPIED_BYTES);
    return m->rights[0] == 'r' && m->rights[3] == 'p' && is_right && !m->is_special;
}

static const char *interpreter_file(struct mapping *all, int count) {
    for (int i = 0; i < count; i++)
        if ((uintptr_t)&PyObject_Malloc >= all[i].start && (uintptr_t)&PyObject_Malloc < all[i].end)
            return all[i].file;
    return "";
}

/* Read through /proc/self/mem: it returns an error where a plain read raises SIGBUS (a library mapped beyond its end). */
static int read_memory(char *to, uintptr_t from, size_t size) {
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    ssize_t n = 1;
    for (size_t at = 0; memory >= 0 && at < size && n > 0; at += (size_t)n)
        n = pread(memory, to + at, size - at, (off_t)(from + at));
    return memory < 0 || close(memory) || n <= 0 ? -1 : 0;
}

static struct row {
    uintptr_t start, stop;
} rows[256];
static int row_count;

static void remember_row(uintptr_t start, uintptr_t stop) {
    start = round_up(start), stop = round_down(stop);
    if (start < stop && row_count < (int)(sizeof rows / sizeof *rows))
        rows[row_count++] = (struct row){start, stop};
}

void huge_pages_collapse(void) {
    for (int i = 0; i < row_count; i++)
        madvise((void *)rows[i].start, rows[i].stop - rows[i].start, MADV_COLLAPSE);
}

/* `start` to `stop` may extend into free space on both sides. */
static void copy_row(struct mapping *first, struct mapping *end, uintptr_t start, uintptr_t stop) {
    size_t size = stop - start;
    char *raw = mmap(NULL, size + 2 * HUGE_PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return;
    char *copy = (char *)(round_up((uintptr_t)raw) + start % HUGE_PAGE); /* same alignment, so that whole huge pages can move */
    madvise(copy, size, MADV_HUGEPAGE);
    char *raw_end = raw + size + 2 * HUGE_PAGE;
    if (copy > raw)
        munmap(raw, (size_t)(copy - raw)); /* first: the copy may move to here */
    munmap(copy + size, (size_t)(raw_end - copy) - size);
    int is_read = 1;
    for (struct mapping *m = first; is_read && m < end; m++)
        is_read = !read_memory(copy + (m->start - start), m->start, m->end - m->start);
    __builtin___clear_cache(copy, copy + size);
    if (is_read && mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)start) != MAP_FAILED)
        remember_row(start, stop);
    else
        munmap(copy, size);
}

/* Allocates malloc's free gaps for good, so that a child's own allocations are close together at the end of the heap (-15
 * faults). Returns where that is. */
static uintptr_t close_gaps(struct mapping *all, int most) {
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 33) /* has mallinfo2 */
    mallopt(M_TOP_PAD, HUGE_PAGE);
    uintptr_t end = (uintptr_t)sbrk(0) - mallinfo2().keepcost;
    int count = read_mappings(all, most);
    for (int i = 0; i < count; i++)
        for (size_t size = (64 << 10) + 8; is_malloc_heap(&all[i]) && size >= 24; size -= 16) {
            uintptr_t p;
            while ((p = (uintptr_t)malloc(size)) >= all[i].start && p < end)
                ;
            free((void *)p);
        }
    void *volatile more = malloc(mallinfo2().keepcost); /* more than is left: the heap grows beyond the next huge page */
    free(more);
    mallopt(M_TOP_PAD, 1 << 20);
    return (uintptr_t)sbrk(0) - mallinfo2().keepcost;
#else
    (void)all, (void)most;
    return (uintptr_t)sbrk(0);
#endif
}

/* Returns the end of the row that begins here, or `first` if there is none. Small gaps between mappings become part of the
 * row. */
static struct mapping *row_end(struct mapping *first, struct mapping *last, const char *interpreter) {
    struct mapping *m = first;
    while (m < last && can_be_copied(m, interpreter) && (m == first || m->start - m[-1].end < HUGE_PAGE))
        m++;
    return m;
}

static int has_library_or_heap(struct mapping *first, struct mapping *end) {
    for (; first < end; first++)
        if (is_library(first) || is_malloc_heap(first))
            return 1;
    return 0;
}

/* Libraries are mapped in rows: text, data, text, data. Each row is replaced by a copy at the same address, as one anonymous
 * mapping on huge pages: a fork copies fewer mappings and page tables, and a child inherits the page tables of the text
 * instead of faulting it in. A row is extended where that gives one more huge page. The used part of malloc's heap is a row
 * too; the heap must still be able to grow. The price: text and data have the same rights. A program may map and run any
 * code anyway, so it gains nothing (separate rights would cost a fifth to a half more CPU time per call: docs/security.md).
 * There must be one thread: the copy would lose what another one writes meanwhile. */
static void copy_rows(struct mapping *all, int most, uintptr_t heap_used) {
    int count = has_one_thread(getpid()) ? read_mappings(all, most) : 0;
    struct mapping *last = all + count, *end;
    char interpreter[sizeof all->file];
    strcpy(interpreter, interpreter_file(all, count));
    for (struct mapping *first = all; first < last; first = end == first ? end + 1 : end) {
        end = row_end(first, last, interpreter);
        if (!has_library_or_heap(first, end))
            continue;
        uintptr_t used = round_up(heap_used);
        if (is_malloc_heap(end - 1) && used > end[-1].start && used < end[-1].end)
            end[-1].end = used;
        uintptr_t start = first->start, stop = end[-1].end;
        if (round_up(start) - start >= MIN_EDGE_BYTES && round_down(start) >= HUGE_PAGE &&
            (first == all || first[-1].end <= round_down(start)))
            start = round_down(start);
        if (stop - round_down(stop) >= MIN_EDGE_BYTES && (end == last || end->start >= round_up(stop)) && !is_malloc_heap(end - 1))
            stop = round_up(stop);
        copy_row(first, end, start, stop);
    }
}

void huge_pages_settle(void) {
    enum { MOST = 8192 };
    char *used_end = (char *)round_up((uintptr_t)next_arena);
    if (used_end < block_end)
        munmap(used_end, (size_t)(block_end - used_end));
    block_end = next_arena;
    /* In the space reserved for arenas, so that it blocks no row. */
    struct mapping *all = mmap(used_end + HUGE_PAGE, MOST * sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        return;
    copy_rows(all, MOST, close_gaps(all, MOST));
    remember_row((uintptr_t)block, (uintptr_t)used_end);
    huge_pages_collapse();
    munmap(all, MOST * sizeof *all);
}

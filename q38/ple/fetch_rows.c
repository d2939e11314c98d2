/* The n-gram rows of one decode step. CUDA calls q38_fetch_rows between two nodes of a graph, on a thread of its own:
 * nothing here may touch Python or CUDA. fetch.py compiles this file; its structures must match these.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, ROOM = 2 * PAGE, DEPTH = 256 }; /* a row may lie on two pages; reads in flight at most */

struct cache { /* direct-mapped: row_cache.RowCache */
    int64_t *ids;
    uint8_t *rows;
    uint64_t shift;
};

struct table {
    int64_t file, rows, width;
    uint8_t *pages;   /* DEPTH * ROOM, on a page boundary; NULL: read through the page cache */
    uint64_t context; /* of native AIO */
    struct cache decode, prompt;
    int64_t asked, hits, nanoseconds; /* since the start */
    int64_t error, row;               /* errno of the first failure, and the row it met; 0: none */
};

struct request {
    struct table *table;
    const int64_t *ids;
    uint8_t *out; /* count * width */
    int64_t count;
};

/* Python fills the cache of prompt rows while a step may be reading it. */
static pthread_mutex_t prompt_rows = PTHREAD_MUTEX_INITIALIZER;

void q38_lock_prompt_rows(void) { pthread_mutex_lock(&prompt_rows); }
void q38_unlock_prompt_rows(void) { pthread_mutex_unlock(&prompt_rows); }

static uint64_t slot_of(const struct cache *cache, int64_t id)
{
    return ((uint64_t)id * 0x9E3779B97F4A7C15u) >> cache->shift;
}

static int take(const struct cache *cache, int64_t id, uint8_t *out, int64_t width)
{
    uint64_t slot = slot_of(cache, id);
    if (cache->ids[slot] != id)
        return 0;
    memcpy(out, cache->rows + slot * width, width);
    return 1;
}

static void keep(struct cache *cache, int64_t id, const uint8_t *row, int64_t width)
{
    uint64_t slot = slot_of(cache, id);
    cache->ids[slot] = id;
    memcpy(cache->rows + slot * width, row, width);
}

static void fail(struct table *table, int64_t error, int64_t row)
{
    if (table->error)
        return;
    table->row = row;
    table->error = error;
}

/* Rows at `places` of the request, with all reads in flight at once. */
static void read_direct(const struct request *request, const int64_t *places, int64_t count)
{
    struct table *table = request->table;
    struct iocb blocks[DEPTH], *pointers[DEPTH];
    struct io_event events[DEPTH];
    int64_t sent = 0, done = 0;
    memset(blocks, 0, count * sizeof *blocks);
    for (int64_t i = 0; i < count; i++) {
        int64_t begin = request->ids[places[i]] * table->width, in_page = begin % PAGE;
        blocks[i].aio_data = i;
        blocks[i].aio_fildes = table->file;
        blocks[i].aio_lio_opcode = IOCB_CMD_PREAD;
        blocks[i].aio_buf = (uint64_t)(uintptr_t)(table->pages + i * ROOM);
        blocks[i].aio_nbytes = in_page + table->width > PAGE ? ROOM : PAGE;
        blocks[i].aio_offset = begin - in_page;
        pointers[i] = &blocks[i];
    }
    while (done < count) { /* also after a failure: what is in flight writes into `pages` */
        if (sent < count) {
            long more = syscall(SYS_io_submit, table->context, count - sent, pointers + sent);
            if (more < 0 && errno != EINTR && errno != EAGAIN) {
                fail(table, errno, request->ids[places[sent]]);
                count = sent;
                continue;
            }
            sent += more > 0 ? more : 0;
        }
        if (sent == done)
            continue;
        long got = syscall(SYS_io_getevents, table->context, 1, DEPTH, events, NULL);
        if (got < 0 && errno != EINTR) {
            fail(table, errno, request->ids[places[done]]);
            return;
        }
        for (long e = 0; e < got; e++) {
            int64_t i = events[e].data, id = request->ids[places[i]], in_page = id * table->width % PAGE;
            if (events[e].res < in_page + table->width)
                fail(table, events[e].res < 0 ? -events[e].res : ENODATA, id);
            else
                memcpy(request->out + places[i] * table->width, table->pages + i * ROOM + in_page, table->width);
        }
        done += got > 0 ? got : 0;
    }
}

static void read_cached(const struct request *request, const int64_t *places, int64_t count)
{
    struct table *table = request->table;
    for (int64_t i = 0; i < count && count > 1; i++) /* the disk sees depth, not one read after the other */
        posix_fadvise(table->file, request->ids[places[i]] * table->width, table->width, POSIX_FADV_WILLNEED);
    for (int64_t i = 0; i < count; i++) {
        int64_t id = request->ids[places[i]];
        ssize_t got;
        do
            got = pread(table->file, request->out + places[i] * table->width, table->width, id * table->width);
        while (got < 0 && errno == EINTR);
        if (got != table->width)
            return fail(table, got < 0 ? errno : ENODATA, id);
    }
}

/* At most DEPTH rows from `first` on. */
static void fetch(const struct request *request, int64_t first, int64_t end)
{
    struct table *table = request->table;
    int64_t absent[DEPTH], missing[DEPTH], absent_count = 0, missing_count = 0;
    for (int64_t i = first; i < end; i++) {
        int64_t id = request->ids[i];
        if (id < 0 || id >= table->rows)
            return fail(table, ERANGE, id);
        if (!take(&table->decode, id, request->out + i * table->width, table->width))
            absent[absent_count++] = i;
    }
    if (absent_count) {
        pthread_mutex_lock(&prompt_rows);
        for (int64_t a = 0; a < absent_count; a++) {
            int64_t i = absent[a];
            if (!take(&table->prompt, request->ids[i], request->out + i * table->width, table->width))
                missing[missing_count++] = i;
        }
        pthread_mutex_unlock(&prompt_rows);
    }
    if (missing_count && table->pages)
        read_direct(request, missing, missing_count);
    else if (missing_count)
        read_cached(request, missing, missing_count);
    if (table->error)
        return;
    for (int64_t a = 0; a < absent_count; a++)
        keep(&table->decode, request->ids[absent[a]], request->out + absent[a] * table->width, table->width);
    table->asked += end - first;
    table->hits += end - first - missing_count;
}

/* A failure stays in the table, for Python to see before it uses what the step computed. */
void q38_fetch_rows(void *argument)
{
    const struct request *request = argument;
    struct timespec begun, ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int64_t i = 0; i < request->count && !request->table->error; i += DEPTH)
        fetch(request, i, i + DEPTH < request->count ? i + DEPTH : request->count);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    request->table->nanoseconds += (ended.tv_sec - begun.tv_sec) * 1000000000 + ended.tv_nsec - begun.tv_nsec;
}

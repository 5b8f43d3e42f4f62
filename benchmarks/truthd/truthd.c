/* truthd: a server whose truth is known. It streams generated tokens on an exact schedule, over one thread and epoll,
 * and writes down when each chunk was due and when it was handed to the kernel, on the clock that the kernel stamps
 * arrivals with. Load clients are held against it.
 *
 *     truthd PORT [name=value ...]          PORT 0: any; the port is printed on stdout
 *
 * POST /v1/chat/completions | /v1/completions | /generate, whose query (?name=value&...) overrides the start's values:
 *     ttft_us, gap_us   first chunk after the request, every next one after the last; gap_us=0: as fast as can be
 *     k, first          tokens in a chunk, and in the first one (0: as k)
 *     jitter_us         each gap is longer or shorter by up to this, the same way every time for the same id
 *     stall_at, stall_us  the gap before that chunk (counting from 0) is longer by this
 *     tokens            output tokens, unless the body says max_tokens or max_completion_tokens
 *     count             how it counts: 0 usage at the end if asked, 1 also in every chunk, 2 token_ids, 3 timings, 4 never
 *     lines             1: CR LF in the event stream
 *     cut_at            close the connection before that chunk; 0: never
 *     id                a number that names the request in the log
 * GET /log     one JSON line a request: {"id", "arrived", "chunks": [[due, sent, tokens], ...]}, nanoseconds since 1970
 * GET /totals  {"requests", "done", "chunks", "tokens", "peak", "cpu_s", "late_us": {"p50", "p99", "max"}}
 * POST /reset  forgets both
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CONNECTIONS = 65536, EVENTS = 1024, BURST = 1000 };
enum dialect { CHAT, COMPLETIONS, GENERATE };
enum field { TTFT_US, GAP_US, K, FIRST, JITTER_US, STALL_AT, STALL_US, TOKENS, COUNT, LINES, CUT_AT, ID, FIELDS };
static const char *const NAMES[FIELDS] = {"ttft_us",  "gap_us", "k",     "first", "jitter_us", "stall_at",
                                          "stall_us", "tokens", "count", "lines", "cut_at",    "id"};
enum counting { AT_END, CONTINUOUS, TOKEN_IDS, TIMINGS, NEVER };

struct buffer {
    char *data;
    size_t start, end, room;
};
struct sending {
    int64_t due, sent;
    int tokens;
};
struct record {
    int64_t id, arrived;
    struct sending *chunks;
    int count, room;
};
struct connection {
    int fd, place; /* place in the heap, -1: not in it */
    struct buffer in, out;
    int64_t field[FIELDS];
    int64_t due;
    uint64_t random;
    enum dialect dialect;
    int usage, prompt, made, chunk, blocked, streaming;
    long record;
};

static struct connection *connections[MOST_CONNECTIONS];
static struct connection **heap;
static int heap_count, poller;
static struct record *records;
static long record_count, record_room;
static long active, peak, done_count;
static int64_t defaults[FIELDS] = {[TTFT_US] = 50000, [GAP_US] = 10000, [K] = 1, [STALL_AT] = -1, [TOKENS] = 128};
static volatile sig_atomic_t stopping;

static int64_t now_on(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int64_t now(void) { return now_on(CLOCK_REALTIME); }

/* --- buffers and the heap of what is due --- */

static char *reserve(struct buffer *b, size_t more)
{
    if (b->start == b->end)
        b->start = b->end = 0;
    if (b->end + more > b->room) {
        b->room = (b->end + more) * 2;
        b->data = realloc(b->data, b->room);
        if (!b->data)
            abort();
    }
    return b->data + b->end;
}
static void append(struct buffer *b, const char *data, size_t length)
{
    memcpy(reserve(b, length), data, length);
    b->end += length;
}
static void place(struct connection *c, int at)
{
    heap[at] = c;
    c->place = at;
}
static void settle(struct connection *c)
{
    int at = c->place;
    while (at && heap[(at - 1) / 2]->due > c->due) {
        place(heap[(at - 1) / 2], at);
        at = (at - 1) / 2;
    }
    for (int below; (below = 2 * at + 1) < heap_count; at = below) {
        if (below + 1 < heap_count && heap[below + 1]->due < heap[below]->due)
            below++;
        if (heap[below]->due >= c->due)
            break;
        place(heap[below], at);
    }
    place(c, at);
}
static void schedule(struct connection *c, int64_t due)
{
    c->due = due;
    if (c->place < 0)
        c->place = heap_count++;
    settle(c);
}
static void unschedule(struct connection *c)
{
    if (c->place < 0)
        return;
    struct connection *last = heap[--heap_count];
    if (last != c) {
        last->place = c->place;
        settle(last);
    }
    c->place = -1;
}

/* --- connections --- */

static void drop(struct connection *c)
{
    active -= c->streaming;
    unschedule(c);
    close(c->fd);
    connections[c->fd] = NULL;
    free(c->in.data);
    free(c->out.data);
    free(c);
}
static void listen_for(struct connection *c, uint32_t events)
{
    struct epoll_event e = {.events = events, .data.fd = c->fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}
/* 1: all is with the kernel; 0: the reader is too slow; -1: the connection is gone. */
static int flush(struct connection *c)
{
    while (c->out.start < c->out.end) {
        ssize_t n = send(c->fd, c->out.data + c->out.start, c->out.end - c->out.start, MSG_NOSIGNAL);
        if (n > 0) {
            c->out.start += n;
        } else if (n < 0 && errno == EAGAIN) {
            if (!c->blocked)
                listen_for(c, EPOLLIN | EPOLLOUT);
            c->blocked = 1;
            return 0;
        } else {
            drop(c);
            return -1;
        }
    }
    if (c->blocked)
        listen_for(c, EPOLLIN);
    c->blocked = 0;
    return 1;
}
static int answer(struct connection *c, const char *type, const char *body, size_t length)
{
    char head[200];
    append(&c->out, head, sprintf(head, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", type, length));
    append(&c->out, body, length);
    return flush(c);
}

/* --- one chunk --- */

static int gap_jitter(struct connection *c, int64_t most)
{
    c->random ^= c->random << 13; /* xorshift64, Marsaglia 2003 */
    c->random ^= c->random >> 7;
    c->random ^= c->random << 17;
    return most ? (int64_t)(c->random % (2 * most + 1)) - most : 0;
}
static void frame(struct connection *c, const char *json, int length, const char *end)
{
    char size[20];
    int ends = strlen(end);
    append(&c->out, size, sprintf(size, "%x\r\n", 6 + length + ends));
    append(&c->out, "data: ", 6);
    append(&c->out, json, length);
    append(&c->out, end, ends);
    append(&c->out, "\r\n", 2);
}
static int counts(struct connection *c, char *to)
{
    int n = 0;
    if (c->field[COUNT] == CONTINUOUS)
        n = sprintf(to, ",\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}", c->prompt, c->made,
                    c->prompt + c->made);
    if (c->field[COUNT] == TIMINGS)
        n = sprintf(to, ",\"timings\":{\"prompt_n\":%d,\"predicted_n\":%d}", c->prompt, c->made);
    return n;
}
static int event_json(struct connection *c, char *to, int k, int last)
{
    static const char *const words[8] = {" the", " of", " and", " to", " in", " is", " that", " for"};
    char text[4096], ids[4096] = "", extra[200] = "";
    int t = 0, n = 0;
    for (int i = 0; i < k; i++)
        t += sprintf(text + t, "%s", words[(c->made - k + i) & 7]);
    if (c->field[COUNT] == TOKEN_IDS) {
        n = sprintf(ids, ",\"token_ids\":[");
        for (int i = 0; i < k; i++)
            n += sprintf(ids + n, "%s%d", i ? "," : "", 1000 + ((c->made - k + i) & 7));
        sprintf(ids + n, "]");
    }
    extra[counts(c, extra)] = 0;
    const char *reason = last ? "\"length\"" : "null";
    if (c->dialect == GENERATE)
        return sprintf(to, "{\"text\":\"%s\",\"meta_info\":{\"id\":\"g%ld\",\"prompt_tokens\":%d,\"completion_tokens\":%d,\"cached_tokens\":0,"
                           "\"finish_reason\":%s}}", text, c->record, c->prompt, c->made, last ? "{\"type\":\"length\",\"length\":1}" : "null");
    if (c->dialect == CHAT)
        return sprintf(to, "{\"id\":\"chatcmpl-%ld\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"truth\",\"choices\":"
                           "[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"%s\"},\"logprobs\":null,\"finish_reason\":%s%s}]%s}",
                       c->record, text, reason, ids, extra);
    return sprintf(to, "{\"id\":\"cmpl-%ld\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"truth\",\"choices\":"
                       "[{\"index\":0,\"text\":\"%s\",\"logprobs\":null,\"finish_reason\":%s%s}]%s}", c->record, text, reason, ids, extra);
}
static void note(struct connection *c, int64_t sent, int tokens)
{
    struct record *r = &records[c->record];
    if (r->count == r->room) {
        r->room = r->room ? r->room * 2 : 160;
        r->chunks = realloc(r->chunks, r->room * sizeof *r->chunks);
    }
    r->chunks[r->count++] = (struct sending){c->due, sent, tokens};
}
/* Sends the chunk that is due and schedules the next; -1: the connection is gone. */
static int emit(struct connection *c)
{
    if (c->field[CUT_AT] && c->chunk == c->field[CUT_AT]) {
        drop(c);
        return -1;
    }
    char json[12288];
    const char *end = c->field[LINES] ? "\r\n\r\n" : "\n\n";
    int k = c->chunk == 0 && c->field[FIRST] ? c->field[FIRST] : c->field[K];
    if (k > c->field[TOKENS] - c->made)
        k = c->field[TOKENS] - c->made;
    c->made += k;
    int last = c->made >= c->field[TOKENS];
    frame(c, json, event_json(c, json, k, last), end);
    if (last) {
        if (c->usage && c->field[COUNT] != NEVER && c->dialect != GENERATE)
            frame(c, json, sprintf(json, "{\"id\":\"x-%ld\",\"object\":\"%s\",\"created\":1700000000,\"model\":\"truth\",\"choices\":[],\"usage\":"
                                         "{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}}", c->record,
                                   c->dialect == CHAT ? "chat.completion.chunk" : "text_completion", c->prompt, c->made, c->prompt + c->made), end);
        frame(c, "[DONE]", 6, end);
        append(&c->out, "0\r\n\r\n", 5);
    }
    note(c, now(), k);
    int64_t gap = c->field[GAP_US] + gap_jitter(c, c->field[JITTER_US]);
    c->chunk++;
    if (c->chunk == c->field[STALL_AT])
        gap += c->field[STALL_US];
    if (last) {
        unschedule(c);
        c->streaming = 0;
        active--;
        done_count++;
    } else {
        /* The schedule is absolute: a late chunk does not move the next. Without a gap, whoever waited longest is next. */
        schedule(c, c->field[GAP_US] ? c->due + 1000 * (gap > 0 ? gap : 0) : now());
    }
    return flush(c);
}

/* --- requests --- */

static int64_t number_after(const char *text, const char *name, int64_t otherwise)
{
    const char *at = strstr(text, name);
    if (!at)
        return otherwise;
    at += strlen(name) + strspn(at + strlen(name), "\": ");
    return *at >= '0' && *at <= '9' ? atoll(at) : otherwise;
}
static void settings(int64_t *into, char *text, const char *separators)
{
    for (char *rest, *pair = strtok_r(text, separators, &rest); pair; pair = strtok_r(NULL, separators, &rest))
        for (int i = 0; i < FIELDS; i++) {
            size_t length = strlen(NAMES[i]);
            if (!strncmp(pair, NAMES[i], length) && pair[length] == '=')
                into[i] = atoll(pair + length + 1);
        }
}
static int by_size(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}
static int totals(struct connection *c)
{
    long chunks = 0, tokens = 0, at = 0;
    for (long i = 0; i < record_count; i++)
        chunks += records[i].count;
    int64_t *late = malloc((chunks + 1) * sizeof *late);
    for (long i = 0; i < record_count; i++)
        for (int j = 0; j < records[i].count; j++) {
            tokens += records[i].chunks[j].tokens;
            late[at++] = records[i].chunks[j].sent - records[i].chunks[j].due;
        }
    qsort(late, chunks, sizeof *late, by_size);
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    double cpu = r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
    char body[600];
    int n = sprintf(body, "{\"requests\":%ld,\"done\":%ld,\"chunks\":%ld,\"tokens\":%ld,\"peak\":%ld,\"cpu_s\":%.4f,"
                          "\"late_us\":{\"p50\":%.1f,\"p99\":%.1f,\"max\":%.1f}}", record_count, done_count, chunks, tokens, peak, cpu,
                    chunks ? late[chunks / 2] / 1e3 : 0, chunks ? late[chunks * 99 / 100] / 1e3 : 0, chunks ? late[chunks - 1] / 1e3 : 0);
    free(late);
    return answer(c, "application/json", body, n);
}
static int whole_log(struct connection *c)
{
    struct buffer b = {0};
    for (long i = 0; i < record_count; i++) {
        struct record *r = &records[i];
        b.end += sprintf(reserve(&b, 100 + r->count * 60), "{\"id\":%ld,\"arrived\":%ld,\"chunks\":[", (long)r->id, (long)r->arrived);
        for (int j = 0; j < r->count; j++)
            b.end += sprintf(b.data + b.end, "%s[%ld,%ld,%d]", j ? "," : "", (long)r->chunks[j].due, (long)r->chunks[j].sent, r->chunks[j].tokens);
        append(&b, "]}\n", 3);
    }
    int result = answer(c, "application/x-ndjson", b.data ? b.data : "", b.end);
    free(b.data);
    return result;
}
static int forget(struct connection *c)
{
    if (!active) {
        for (long i = 0; i < record_count; i++)
            free(records[i].chunks);
        record_count = done_count = peak = 0;
    }
    return answer(c, "application/json", "{}", 2);
}
static int generate(struct connection *c, enum dialect dialect, char *query, const char *body, size_t length)
{
    memcpy(c->field, defaults, sizeof defaults);
    c->field[TOKENS] = number_after(body, "\"max_completion_tokens\"",
                                    number_after(body, "\"max_tokens\"", number_after(body, "\"max_new_tokens\"", defaults[TOKENS])));
    settings(c->field, query, "?& ");
    c->dialect = dialect;
    c->usage = strstr(body, "include_usage") != NULL;
    c->prompt = length / 4;
    c->made = c->chunk = 0;
    c->random = 0x9E3779B97F4A7C15ULL ^ (c->field[ID] + 1) * 0xD1B54A32D192ED03ULL;
    if (record_count == record_room) {
        record_room = record_room ? record_room * 2 : 4096;
        records = realloc(records, record_room * sizeof *records);
    }
    int64_t arrived = now();
    c->record = record_count++;
    records[c->record] = (struct record){.id = c->field[ID], .arrived = arrived};
    c->streaming = 1;
    if (++active > peak)
        peak = active;
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    append(&c->out, head, sizeof head - 1);
    schedule(c, arrived + c->field[TTFT_US] * 1000);
    return flush(c);
}
static int handle(struct connection *c, char *line, const char *body, size_t length)
{
    char *path = strchr(line, ' '), *end = path ? strchr(path + 1, ' ') : NULL;
    if (!end)
        return answer(c, "text/plain", "", 0);
    *path++ = *end = 0;
    char *query = strchr(path, '?');
    if (query)
        *query++ = 0;
    char none[1] = "";
    if (!strcmp(line, "POST") && strstr(path, "/chat/completions"))
        return generate(c, CHAT, query ? query : none, body, length);
    if (!strcmp(line, "POST") && strstr(path, "/completions"))
        return generate(c, COMPLETIONS, query ? query : none, body, length);
    if (!strcmp(line, "POST") && !strcmp(path, "/generate"))
        return generate(c, GENERATE, query ? query : none, body, length);
    if (!strcmp(path, "/log"))
        return whole_log(c);
    if (!strcmp(path, "/totals"))
        return totals(c);
    if (!strcmp(path, "/reset"))
        return forget(c);
    if (!strcmp(path, "/metrics"))
        return answer(c, "text/plain; version=0.0.4", "# no metrics\n", 13);
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"truth\",\"object\":\"model\",\"created\":1700000000,\"owned_by\":\"truth\"}]}";
    return answer(c, "application/json", models, sizeof models - 1);
}
/* Takes whole requests out of what has come in; a second one waits until the first is answered. */
static void take(struct connection *c)
{
    while (!c->streaming) {
        char *head = c->in.data + c->in.start;
        size_t held = c->in.end - c->in.start;
        char *blank = memmem(head, held, "\r\n\r\n", 4);
        if (!blank)
            return;
        *blank = 0;
        char *said = strcasestr(head, "\r\ncontent-length:");
        size_t length = said ? strtoul(said + 17, NULL, 10) : 0, used = blank + 4 - head + length;
        if (held < used) {
            *blank = '\r';
            return;
        }
        char *body = strndup(blank + 4, length);
        int fd = c->fd;
        handle(c, head, body, length);
        free(body);
        if (connections[fd] != c)
            return;
        c->in.start += used;
    }
}

/* --- the loop --- */

static void welcome(int listener)
{
    for (int one = 1, fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= MOST_CONNECTIONS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *c = connections[fd] = calloc(1, sizeof *c);
        c->fd = fd;
        c->place = -1;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
}
static void attend(struct connection *c, uint32_t events)
{
    if (events & EPOLLOUT) {
        int flushed = flush(c);
        if (flushed < 0)
            return;
        if (flushed && c->streaming && c->place < 0)
            schedule(c, c->due);
    }
    if (!(events & ~EPOLLOUT))
        return;
    ssize_t n = recv(c->fd, reserve(&c->in, 1 << 17), (1 << 17) - 1, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN)) {
        drop(c);
    } else if (n > 0) {
        c->in.end += n;
        take(c);
    }
}
static void send_due(void)
{
    int64_t time = now();
    for (int i = 0; heap_count && heap[0]->due <= time && i < BURST; i++) {
        struct connection *c = heap[0];
        if (c->blocked) { /* the reader is too slow: go on when it has read, and be late by that much */
            unschedule(c);
            continue;
        }
        if (emit(c) >= 0 && !c->streaming && c->in.start < c->in.end)
            take(c);
        if (c->field[GAP_US])
            time = now();
    }
}
static void on_signal(int signal)
{
    (void)signal;
    stopping = 1;
}
int main(int count, char **words)
{
    if (count < 2) {
        fprintf(stderr, "usage: truthd PORT [name=value ...]\n");
        return 2;
    }
    for (int i = 2; i < count; i++)
        settings(defaults, words[i], " ");
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* whoever started it is gone: nobody will stop it */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    heap = malloc(MOST_CONNECTIONS * sizeof *heap);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (void *)&address, size) || listen(listener, 8192) || getsockname(listener, (void *)&address, &size)) {
        perror("truthd");
        return 1;
    }
    poller = epoll_create1(0);
    struct epoll_event events[EVENTS], e = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    while (!stopping) {
        struct timespec until, *wait = NULL;
        if (heap_count) {
            int64_t left = heap[0]->due - now();
            left = left < 0 ? 0 : left;
            until = (struct timespec){left / 1000000000, left % 1000000000};
            wait = &until;
        }
        int ready = epoll_pwait2(poller, events, EVENTS, wait, NULL);
        for (int i = 0; i < ready; i++) {
            if (events[i].data.fd == listener)
                welcome(listener);
            else if (connections[events[i].data.fd])
                attend(connections[events[i].data.fd], events[i].events);
        }
        send_due();
    }
    return 0;
}

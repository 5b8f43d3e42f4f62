/* reader: what a machine allows a load client. One thread, epoll, and for each read the search for events in it and one
 * look at the clock; nothing is parsed. Other clients are held against it.
 *
 *     reader PORT CONCURRENCY REQUESTS TOKENS [QUERY]
 *
 * A closed loop over CONCURRENCY kept connections; prints one JSON object. Times in seconds; `chunks` leaves the usage
 * event out, as it is no token.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 1024, KEPT = 8 };
struct stream {
    int fd, kept;
    char tail[KEPT];
    double sent, last;
    int seen;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
static double cpu(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}
static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static void show(const char *name, double *values, long count)
{
    double sum = 0;
    for (long i = 0; i < count; i++)
        sum += values[i];
    qsort(values, count, sizeof *values, by_size);
    printf(",\"%s\":{\"mean\":%.7f,\"p50\":%.7f,\"p99\":%.7f}", name, count ? sum / count : 0, count ? values[count / 2] : 0,
           count ? values[count * 99 / 100] : 0);
}
static void fail(const char *what)
{
    perror(what);
    exit(1);
}

int main(int count, char **words)
{
    if (count < 5) {
        fprintf(stderr, "usage: reader PORT CONCURRENCY REQUESTS TOKENS [QUERY]\n");
        return 2;
    }
    int concurrency = atoi(words[2]), tokens = atoi(words[4]);
    long requests = atol(words[3]);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    char filler[401], body[1024], request[2048];
    memset(filler, 'x', 400);
    filler[400] = 0;
    int length = sprintf(body, "{\"model\":\"truth\",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"max_tokens\":%d,"
                               "\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]}", tokens, filler);
    int size = sprintf(request, "POST /v1/chat/completions?%s HTTP/1.1\r\nHost: truth\r\nContent-Type: application/json\r\n"
                                "Content-Length: %d\r\n\r\n%s", count > 5 ? words[5] : "", length, body);
    int poller = epoll_create1(0), one = 1;
    struct stream *streams = calloc(concurrency, sizeof *streams);
    double *ttft = malloc(requests * sizeof *ttft), *gap = malloc(requests * (tokens + 2) * sizeof *gap);
    long first = 0, gaps = 0, sent = 0, done = 0, reads = 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < concurrency; i++) {
        int fd = streams[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (void *)&address, sizeof address))
            fail("connect");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event e = {.events = EPOLLIN, .data.u32 = i};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
    }
    double spent = cpu(), start = now(), area = 0, since = start;
    long held = 0, peak = 0;
    static char data[KEPT + (1 << 17)];
    struct epoll_event events[EVENTS];
    for (int i = 0; i < concurrency && sent < requests; i++, sent++, held++) {
        streams[i].sent = now();
        if (send(streams[i].fd, request, size, 0) != size)
            fail("send");
    }
    peak = held;
    while (done < requests) {
        int ready = epoll_wait(poller, events, EVENTS, 10000);
        if (ready <= 0)
            fail("stalled");
        for (int i = 0; i < ready; i++) {
            struct stream *s = &streams[events[i].data.u32];
            memcpy(data, s->tail, s->kept);
            ssize_t n = recv(s->fd, data + s->kept, 1 << 17, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN)
                continue;
            if (n <= 0)
                fail("closed");
            double time = now();
            reads++;
            size_t all = s->kept + n;
            for (char *at = data, *found; (found = memmem(at, data + all - at, "data: {", 7)); at = found + 7) {
                if (s->seen++)
                    gap[gaps++] = time - s->last;
                else
                    ttft[first++] = time - s->sent;
                s->last = time;
            }
            if (all >= 5 && !memcmp(data + all - 5, "0\r\n\r\n", 5)) {
                gaps -= s->seen > 1; /* the usage event */
                s->kept = s->seen = 0;
                done++;
                if (sent < requests) {
                    sent++;
                    s->sent = now();
                    if (send(s->fd, request, size, 0) != size)
                        fail("send");
                } else {
                    time = now();
                    area += held-- * (time - since);
                    since = time;
                }
                continue;
            }
            s->kept = all < 6 ? all : 6;
            memcpy(s->tail, data + all - s->kept, s->kept);
        }
    }
    double wall = now() - start, used = cpu() - spent;
    long chunks = first + gaps;
    printf("{\"wall_s\":%.6f,\"cpu_s\":%.6f,\"requests\":%ld,\"chunks\":%ld,\"reads\":%ld,\"peak\":%ld,\"mean_in_flight\":%.3f", wall, used, done,
           chunks, reads, peak, area / wall);
    show("ttft_s", ttft, first);
    show("gap_s", gap, gaps);
    printf("}\n");
    return 0;
}

/* A wrong clock of one process: it stands still, or is off by WRONG_CLOCK_S seconds. Time that is only measured goes on. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define STANDS_AT 1580608922 /* 2 February 2020 */

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = syscall(SYS_clock_gettime, clock, now);
    const char *wrong = getenv("WRONG_CLOCK_S");
    if (failed || !wrong || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return failed;
    if (strcmp(wrong, "stopped") == 0)
        *now = (struct timespec){STANDS_AT, 0};
    else
        now->tv_sec += atol(wrong);
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
    return failed;
}

time_t time(time_t *out)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out)
        *out = precise.tv_sec;
    return precise.tv_sec;
}

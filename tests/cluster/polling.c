/* A sched_yield that sleeps: a thread that polls leaves its core to the others (polling.py). */

#include <sys/prctl.h>
#include <time.h>

#define PAUSE_NS 50000
#define SLACK_NS 1000

int sched_yield(void)
{
    static __thread int is_exact;
    const struct timespec pause = {0, PAUSE_NS};

    if (!is_exact) { /* by default the kernel may wake a thread 50 us late */
        prctl(PR_SET_TIMERSLACK, SLACK_NS);
        is_exact = 1;
    }
    nanosleep(&pause, 0);
    return 0;
}

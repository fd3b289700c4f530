/* Preloaded into a process (LD_PRELOAD), lets another one step its wall clock while it runs: to CLOCK_REALTIME is added
 * what the file named by STEPPED_CLOCK holds, an int64 of seconds. CLOCK_MONOTONIC, sleeps and relative waits stay.
 *
 * Waits until a wall-clock time get their time set back by the same, so that they last as long as was meant; unlike the
 * kernel's they do not end early when the clock is stepped forward meanwhile.
 *
 * libfaketime 0.9.10, which Debian has, does not do: with CLOCK_MONOTONIC left alone, its clock_nanosleep makes every
 * time.sleep of Python 3.11 raise EINVAL.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
static const volatile int64_t *step_s = &none;

__attribute__((constructor)) static void map_step(void) {
  const char *path = getenv("STEPPED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) step_s = found;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = NEXT(clock_gettime);
  int failed = next(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *step_s;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static struct timespec meant(const struct timespec *until) {
  struct timespec real = *until;
  real.tv_sec -= *step_s;
  return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  /* Which clock the condition was made for cannot be asked. A monotonic time is that since boot: years before 2001. */
  struct timespec real = until->tv_sec > 1000000000 ? meant(until) : *until;
  return NEXT(pthread_cond_timedwait)(cond, mutex, &real);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
  struct timespec real = meant(until);
  return NEXT(sem_timedwait)(sem, &real);
}

/* Abseil, and so gRPC, waits on futexes by itself. */
long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (!next) next = NEXT(syscall);
  long a[6];
  struct timespec real;
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME && a[3] && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
    real = meant((const struct timespec *)a[3]);
    a[3] = (long)&real;
  }
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

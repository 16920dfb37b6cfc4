/* Preloaded into processes whose wall clock jumps: adds seconds to it that a file says.

   The file that JUMPING_CLOCK names holds them as a native int64, and may change at any time. Other
   clocks are untouched. Who waits until a time of this clock tells it to the kernel, whose clock
   does not jump: that time is taken back by as much. Times below 1e9 s are those of other clocks,
   which begin with the machine. Waits that are under way when the clock jumps do not notice. */

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

static const int64_t no_jump = 0;
static const volatile int64_t *jump_s = &no_jump;
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void begin(void) {
  real_syscall = dlsym(RTLD_NEXT, "syscall");
  const char *path = getenv("JUMPING_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *map = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (map != MAP_FAILED) jump_s = map;
}

static long call(long number, long a, long b, long c, long d, long e, long f) {
  if (!real_syscall) real_syscall = dlsym(RTLD_NEXT, "syscall");
  return real_syscall(number, a, b, c, d, e, f);
}

static int is_wall(clockid_t id) { return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE; }

static int is_wall_time(const struct timespec *at) { return at->tv_sec > 1000000000; }

static struct timespec kernels(const struct timespec *at) {
  struct timespec taken_back = *at;
  if (is_wall_time(at)) taken_back.tv_sec -= *jump_s;
  return taken_back;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *); /* the vDSO's, which costs no system call */
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, now);
  if (!failed && is_wall(id)) now->tv_sec += *jump_s;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *also) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (also) *also = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *until) {
  struct timespec at = kernels(until);
  clockid_t id = is_wall_time(until) ? CLOCK_REALTIME : CLOCK_MONOTONIC;
  return pthread_cond_clockwait(condition, mutex, id, &at);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
  struct timespec at = kernels(until);
  return pthread_mutex_clocklock(mutex, CLOCK_REALTIME, &at);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  struct timespec at = kernels(until);
  return sem_clockwait(semaphore, CLOCK_REALTIME, &at);
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *until, struct timespec *left) {
  static int (*real)(clockid_t, int, const struct timespec *, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_nanosleep");
  struct timespec at = *until;
  if ((flags & TIMER_ABSTIME) && is_wall(id)) at = kernels(until);
  return real(id, flags, &at, left);
}

long syscall(long number, ...) { /* of Abseil, which waits and reads the clock by itself */
  va_list arguments;
  long a[6];
  va_start(arguments, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    struct timespec at = kernels((const struct timespec *)a[3]);
    return call(number, a[0], a[1], a[2], (long)&at, a[4], a[5]);
  }
  long result = call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == SYS_clock_gettime && !result && is_wall((clockid_t)a[0]))
    ((struct timespec *)a[1])->tv_sec += *jump_s;
  return result;
}

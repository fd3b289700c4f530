/* A disk that fails on command: preloaded, it counts the system calls that change a file below one folder, and at the
   n-th of them ends the process or gives an error; or it tells what it sees.

   crash_arm(folder, at, how): how 0: end before the call; 1: ENOSPC at this call and at every later one that needs
   room; 2: EIO at this call alone. at 0: only count. crash_kinds(): a letter for each call so far, w: a write, r: another
   that needs room, o: others. crash_watch(seen): seen(0) is called after each call, and seen(1) where half of a write
   is done. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { BEFORE, FULL, BROKEN };
#define CRASHED 99

static char root[4096];
static long at, count;
static char kinds[1 << 20];
static int how;
static void (*watcher)(int half);

void crash_watch(void (*seen)(int)) { watcher = seen; }

static void seen(int mine, int half) {
  int before = errno;
  if (watcher && mine) watcher(half);
  errno = before;
}

void crash_arm(const char *folder, long point, int what) {
  snprintf(root, sizeof root, "%s/", folder);
  at = point;
  how = what;
  count = 0;
  memset(kinds, 0, sizeof kinds);
}

const char *crash_kinds(void) { return kinds; }

static int below(const char *path) { return root[0] && !strncmp(path, root, strlen(root)); }

static int below_fd(int fd) {
  char link[64], path[4096];
  if (!root[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 2);
  if (n < 0) return 0;
  path[n] = '/'; /* so that the folder itself counts */
  path[n + 1] = 0;
  return below(path);
}

static int below_at(int fd, const char *path) { return path[0] == '/' || fd == AT_FDCWD ? below(path) : below_fd(fd); }

/* Whether this call fails, with errno. */
static int fails(char kind) {
  int needs_room = kind != 'o';
  if (count < (long)sizeof kinds - 1) kinds[count] = kind;
  count++;
  if (!at || count < at) return 0;
  if (how == FULL) {
    if (needs_room) errno = ENOSPC;
    return needs_room;
  }
  if (count > at) return 0;
  if (how == BEFORE) _exit(CRASHED);
  errno = EIO;
  return 1;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(result, name, parameters, mine, room, call) \
  result name parameters { \
    int here = (mine); \
    if (here && fails(room)) return -1; \
    result done = REAL(name) call; \
    seen(here, 0); \
    return done; \
  }

ssize_t write(int fd, const void *data, size_t size) {
  int here = below_fd(fd);
  if (here && fails('w')) return -1;
  ssize_t half = here && watcher ? REAL(write)(fd, data, size / 2) : 0;
  if (half < 0) return half;
  seen(here, 1);
  ssize_t rest = REAL(write)(fd, (const char *)data + half, size - half);
  seen(here, 0);
  return rest < 0 ? rest : half + rest;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place) {
  int here = below_fd(fd);
  if (here && fails('w')) return -1;
  if (here && watcher) REAL(pwrite64)(fd, data, size / 2, place);
  seen(here, 1);
  ssize_t done = REAL(pwrite64)(fd, data, size, place);
  seen(here, 0);
  return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t place) { return pwrite64(fd, data, size, place); }

WRAP(int, fsync, (int fd), below_fd(fd), 'r', (fd))
WRAP(int, fdatasync, (int fd), below_fd(fd), 'r', (fd))
WRAP(int, ftruncate, (int fd, off_t size), below_fd(fd), 'o', (fd, size))
WRAP(int, ftruncate64, (int fd, off64_t size), below_fd(fd), 'o', (fd, size))
WRAP(int, rename, (const char *from, const char *to), below(to), 'r', (from, to))
WRAP(int, unlink, (const char *path), below(path), 'o', (path))
WRAP(int, unlinkat, (int fd, const char *path, int flags), below_at(fd, path), 'o', (fd, path, flags))
WRAP(int, rmdir, (const char *path), below(path), 'o', (path))
WRAP(int, mkdir, (const char *path, mode_t mode), below(path), 'r', (path, mode))

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }

#define CHANGES(flags) ((flags) & (O_CREAT | O_TRUNC))
#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = mode_of(flags, rest); \
    va_end(rest); \
    int here = CHANGES(flags) && below(path); \
    if (here && fails('r')) return -1; \
    int fd = REAL(name)(path, flags, mode); \
    seen(here, 0); \
    return fd; \
  }
OPEN(open)
OPEN(open64)

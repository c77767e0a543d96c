// A small pool of threads that works through one job together, with barriers that keep the core.
//
// A step of a small model has hundreds of barriers, and several calls follow one another within a millisecond. OpenMP's
// runtime lets its threads sleep early when a process has more of them than cores, and on a shared machine each sleeper
// then waits a scheduler slice to come back: a step of 10 ms takes a second. Barriers here spin; between jobs a worker
// looks for the next one for a while, giving way to whoever wants the core, and only then sleeps.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

enum { TEAM_COUNTERS = 4, BARRIER_SPINS = 1 << 12, IDLE_LOOKS = 1 << 12, PAUSES_PER_LOOK = 16 };

typedef struct {
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int generation;
    _Alignas(64) atomic_int next[TEAM_COUNTERS][16];  // one cache line each
    int size;
} mg_team;

// One thread's view of the team: its index, and how many shared loops it has passed.
typedef struct {
    mg_team *team;
    int index, loops;
} mg_member;

typedef void (*mg_job)(mg_member *member, void *arguments);

typedef struct mg_pool mg_pool;
typedef struct {
    mg_pool *pool;
    int index;
    pthread_t thread;
} mg_worker;

struct mg_pool {
    mg_team team;
    _Alignas(64) atomic_int posted;  // number of the newest job
    _Alignas(64) atomic_int busy;  // workers that have not finished it
    atomic_int sleeping;
    int stopping, started;
    mg_job job;
    void *arguments;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    mg_worker *workers;
};

static inline void team_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");  // most of these CPUs take yield for nothing
#endif
}

// One more round of waiting for threads that should be done in a moment. On a busy machine they may have lost their
// core, perhaps to this one, so it is given away after a while.
static inline void team_wait(int *spins) {
    if (++*spins < BARRIER_SPINS)
        team_pause();
    else
        sched_yield();
}

static inline void team_barrier(mg_team *team) {
    if (team->size == 1) return;
    const int generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
        return;
    }
    int spins = 0;
    while (atomic_load_explicit(&team->generation, memory_order_acquire) == generation) team_wait(&spins);
}

// The next unclaimed index of the current loop; indices past the loop's end mean that it is used up.
static inline int team_claim(mg_member *member) {
    return atomic_fetch_add_explicit(&member->team->next[member->loops % TEAM_COUNTERS][0], 1, memory_order_relaxed);
}

// Ends a loop for this thread: waits for all, then the counter two loops ahead is cleared by one of them.
static inline void team_end_loop(mg_member *member) {
    team_barrier(member->team);
    member->loops++;
    if (member->index == 0)
        atomic_store_explicit(&member->team->next[(member->loops + 1) % TEAM_COUNTERS][0], 0, memory_order_relaxed);
}

// for-loops over [0, n): claimed one by one, or dealt out in turn when the pieces are small and equal.
#define TEAM_CLAIMED(i, n) for (int i = team_claim(member); i < (n); i = team_claim(member))
#define TEAM_DEALT(i, n) for (int i = member->index; i < (n); i += member->team->size)

static void *pool_worker(void *argument) {
    mg_worker *self = argument;
    mg_pool *pool = self->pool;
    float_mode_begin();
    for (int seen = 0;; seen++) {
        for (int looks = 0; atomic_load(&pool->posted) == seen; looks++) {
            if (looks < IDLE_LOOKS) {
                for (int i = 0; i < PAUSES_PER_LOOK; i++) team_pause();
                sched_yield();
                continue;
            }
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleeping, 1);
            while (atomic_load(&pool->posted) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->lock);
        }
        if (pool->stopping) return NULL;
        mg_member member = {&pool->team, self->index, 0};
        pool->job(&member, pool->arguments);
        atomic_fetch_sub(&pool->busy, 1);
    }
}

static void pool_post(mg_pool *pool) {
    atomic_fetch_add(&pool->posted, 1);
    if (atomic_load(&pool->sleeping)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
}

// Run a job on all threads, the caller being member 0. One caller at a time.
static void pool_run(mg_pool *pool, mg_job job, void *arguments) {
    const int size = pool->team.size;
    memset(&pool->team, 0, sizeof pool->team);
    pool->team.size = size;
    pool->job = job;
    pool->arguments = arguments;
    atomic_store(&pool->busy, size - 1);
    if (size > 1) pool_post(pool);
    mg_member member = {&pool->team, 0, 0};
    const float_mode before = float_mode_begin();
    job(&member, arguments);
    float_mode_end(before);
    int spins = 0;
    while (atomic_load(&pool->busy)) team_wait(&spins);
}

void mg_pool_free(mg_pool *pool) {
    if (!pool) return;
    pool->stopping = 1;
    pool_post(pool);
    for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    free(pool->workers);
    free(pool);
}

// NULL when threads or memory can't be had.
mg_pool *mg_pool_new(int threads) {
    mg_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->team.size = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->workers = calloc(threads, sizeof *pool->workers);
    for (int i = 1; pool->workers && i < threads; i++) {
        mg_worker *worker = pool->workers + pool->started;
        *worker = (mg_worker){pool, i, 0};
        if (pthread_create(&worker->thread, NULL, pool_worker, worker)) break;
        pool->started++;
    }
    if (!pool->workers || pool->started != threads - 1) {
        mg_pool_free(pool);
        return NULL;
    }
    return pool;
}

/* ftcomm's C interface. Every function returns an FT_* code (0: ok) unless it says otherwise; after an error,
 * ft_last_error() of the same thread has the detail as JSON:
 *   {"code":1,"name":"peer failure","message":"...","operation":"...","ranks":[2],"evidence":["pidfd"],"epoch":3}
 * Buffers are the caller's and must live until the request is done. A communicator may be used from one thread at a time.
 */
#ifndef FTCOMM_FTCOMM_H
#define FTCOMM_FTCOMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FT_API __attribute__((visibility("default")))

enum {
    FT_OK = 0,
    FT_PEER_FAILURE = 1,
    FT_REVOKED = 2,
    FT_STALE_EPOCH = 3,
    FT_NO_AUTHORITY = 4,
    FT_TIMEOUT = 5,
    FT_MISMATCH = 6,
    FT_INVALID = 7,
    FT_INTERRUPTED = 8,
    FT_CLOSED = 9,
    FT_SYSTEM = 10,
    FT_UNSUPPORTED = 11,
    FT_TRUNCATED = 12,
    FT_CANCELLED = 13,
    FT_INTERNAL = 14,
    FT_LOG_FULL = 15,
    FT_LOG_CORRUPT = 16,
    FT_REPLAY_DIVERGED = 17
};
enum {
    FT_ALL_REDUCE,
    FT_BROADCAST,
    FT_REDUCE,
    FT_ALL_GATHER,
    FT_REDUCE_SCATTER,
    FT_GATHER,
    FT_SCATTER,
    FT_ALL_TO_ALL,
    FT_BARRIER
};
enum { FT_RAISE, FT_LOSSY, FT_REPLAY };
enum { FT_ANY = -1, FT_ANY_OR_FAIL = -2 }; /* from anybody; see ft_request_wait */

typedef struct ft_job ft_job;
typedef struct ft_request ft_request;
typedef uint64_t ft_comm;

/* A store for rendezvous-time membership cells, called from one thread of the library.
 * get: writes up to cap bytes, returns the length, 0 when missing, < 0 on error.
 * compare_set: returns the length of the value that the key has afterwards (written to out), < 0 on error. */
typedef struct {
    void* context;
    int64_t (*get)(void* context, const char* key, uint8_t* out, size_t cap);
    int64_t (*compare_set)(void* context, const char* key, const uint8_t* expected, size_t expected_len, const uint8_t* desired,
                           size_t desired_len, uint8_t* out, size_t cap);
} ft_store;

typedef struct {
    const char* job;             /* unique per job; part of every key */
    int32_t rank, world_size;
    uint32_t incarnation;        /* 0 at first start, +1 for each replacement of the slot */
    double heartbeat, timeout;   /* seconds */
    const char* transport;       /* "auto", "shm", "tcp" */
    const char* interface_;      /* network interface or address to bind, "" or NULL: found */
    const char* host;            /* host identity, "" or NULL: found */
    const uint8_t* secret;       /* NULL: only loopback and shared memory are accepted */
    size_t secret_len;
    const char* faults;          /* FTCOMM_FAULTS, NULL: none */
    const ft_store* store;       /* NULL: authority in shared memory, all ranks on one host */
    const char* authority;       /* "auto", "shm", "store" */
    int32_t policy;              /* of the communicator of all ranks: FT_RAISE, ...; with log_dir it is FT_REPLAY */
    void (*on_event)(void* context, const char* json);  /* from a library thread; may be NULL */
    void* event_context;
    /* Policy replay, NULL: any other. A folder of this job; what a slot's earlier processes have logged is found there. */
    const char* log_dir;
    const char* log_job;         /* the job's name in all its generations, NULL: job */
    uint64_t log_limit;          /* bytes in memory, per rank */
    const char* log_spill;       /* a folder on disk for what is above the limit, NULL: FT_LOG_FULL then */
    uint64_t log_spill_limit;    /* 0: none */
    int32_t log_durability;      /* 0: survives the process, 1: the host */
    int32_t log_remove;          /* 1: the last rank of the host that leaves removes the folder */
    const uint8_t* finished;     /* world_size flags: slots that have left for good before this start; NULL: none */
    int32_t log_late;            /* 1: messages between hosts are logged off the critical path */
    const char* log_scope;       /* which messages are logged: "all" (or NULL), "inter-host", or between groups, as "0,1/2,3" */
} ft_job_config;

/* Start-up: create, publish ft_job_address() to the others, gather theirs, ft_job_start(). */
FT_API int ft_job_create(const ft_job_config* config, ft_job** out);
FT_API int ft_job_address(ft_job* job, const uint8_t** data, size_t* length);
/* addresses[r] is rank r's blob, lengths[r] == 0: not known (a dead slot seen by a joiner). Blocks until linked or timeout;
 * on FT_TIMEOUT the ranks in the error detail are those that did not answer. joining: 1 for a replacement.
 * boot_nonce: chosen by the lowest rank and distributed with the addresses. FT_INTERRUPTED: a signal came, or a second has gone
 * by, in which the caller may have learnt that there will be no start: call again, or close. */
FT_API int ft_job_start(ft_job* job, const uint8_t* const* addresses, const size_t* lengths, uint64_t boot_nonce, int32_t joining,
                        double timeout);
/* Policy replay, before ft_job_start() of one that is no replacement: no process of this job has come to a communicator yet, so
 * the slot's earlier ones have logged nothing. */
FT_API int ft_job_unlogged(ft_job* job);
/* Graceful: says goodbye, lingers until nobody needs this rank (bounded by 2 heartbeats of silence), stops threads. */
FT_API int ft_job_leave(ft_job* job, double timeout);
FT_API void ft_job_close(ft_job* job);                 /* also without leave; frees all; NULL is fine */
FT_API int ft_job_info(ft_job* job, char* out, size_t cap);  /* JSON; returns needed length via FT_OK and truncates */
FT_API uint64_t ft_job_epoch(ft_job* job);
FT_API int ft_job_alive(ft_job* job, uint8_t* flags /* world_size */);
FT_API int ft_job_waiting(ft_job* job, uint8_t* flags /* world_size: replacements asking to come in */);
/* on_event hears of all events (so at first), or with all = 0 only that this rank was voted out. */
FT_API int ft_job_tell(ft_job* job, int32_t all);
FT_API int ft_job_stale(ft_job* job);                  /* 1: voted out; 2: because one of its log group died: start it again */

FT_API int ft_comm_create(ft_job* job, uint64_t id, const char* name, const int32_t* slots, int32_t size, int32_t policy,
                          double timeout);
/* Policy replay: before anything is posted on a new communicator. Done at once, but where the log of this rank's earlier processes is lost
 * and comes from the other ranks. */
FT_API int ft_comm_ready(ft_job* job, ft_comm comm, ft_request** out);
FT_API int ft_comm_close(ft_job* job, ft_comm comm);
FT_API int ft_comm_revoke(ft_job* job, ft_comm comm);
FT_API int ft_comm_revoked(ft_job* job, ft_comm comm);  /* 0, 1 */
FT_API int ft_comm_alive(ft_job* job, ft_comm comm, uint8_t* flags /* size */);
/* In the order in which this rank has come to know of them; ack_failed acknowledges the first n, or all (-1). */
FT_API int ft_comm_failed(ft_job* job, ft_comm comm, int32_t* ranks /* room for size */, int32_t* n);
FT_API int ft_comm_ack_failed(ft_job* job, ft_comm comm, int32_t n);
FT_API int ft_comm_solo(ft_job* job, ft_comm comm);     /* 1: a replacement before its admission */
FT_API uint64_t ft_comm_seq(ft_job* job, ft_comm comm);

/* Policy replay, collective. resume: what every process does again ends here; go on at the checkpoint `tag`, NULL: here. commit: this rank's
 * state at this point is saved as `tag`; all ranks or none. checkpoints: JSON list of tags, the newest first; *needed is its length, written
 * where it fits. */
FT_API int ft_comm_resume(ft_job* job, ft_comm comm, const char* tag, ft_request** out);
/* What the log says of messages that are sent from now on. micro_batch < 0: the nth message to each rank is of micro-batch n, from 0. */
FT_API int ft_comm_log_position(ft_job* job, ft_comm comm, uint64_t iteration, int64_t micro_batch);
/* hollow: while it is on, this rank sends again what its log has without the content: compared by tag and size; another send is refused.
 * ahead: JSON, by rank: {"operations": n, "sent": [], "received": [], "sends_left": [], "receives_left": []}; *needed as below. */
FT_API int ft_comm_hollow(ft_job* job, ft_comm comm, int on);
FT_API int ft_comm_ahead(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed);
/* What this rank's log has as its nth message to dst, n from 1: size, and CRC-32C of the content. */
FT_API int ft_comm_logged(ft_job* job, ft_comm comm, int dst, uint64_t n, uint64_t* bytes, uint32_t* crc);
FT_API int ft_job_flush_log(ft_job* job);             /* what is logged late is in the log when it returns */
FT_API int ft_comm_commit(ft_job* job, ft_comm comm, const char* tag, ft_request** out);
FT_API int ft_comm_checkpoints(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed);
/* A note says where this rank is, and needs no other rank: for a replacement that has its state from somewhere else. notes: tags that it can
 * go on from, as above. resume_noted: as resume, and collective with it: the others may call either. */
FT_API int ft_comm_note(ft_job* job, ft_comm comm, const char* tag);
FT_API int ft_comm_notes(ft_job* job, ft_comm comm, char* out, size_t cap, size_t* needed);
FT_API int ft_comm_resume_noted(ft_job* job, ft_comm comm, const char* tag, ft_request** out);

typedef struct {
    int32_t kind, dtype, op, algorithm, root;
    uint64_t count;
    const void* send;
    void* recv;
    const uint64_t *send_counts, *send_offsets, *recv_counts, *recv_offsets;  /* communicator size each, or NULL */
    double factor, timeout;      /* timeout 0: the communicator's */
    int32_t waits;               /* not 0: the caller waits for it next, and so rings later for whom it has sent something */
} ft_op;

FT_API int ft_collective(ft_job* job, ft_comm comm, const ft_op* op, ft_request** out);
FT_API int ft_send(ft_job* job, ft_comm comm, const void* data, uint64_t bytes, int32_t dst, int64_t tag, ft_request** out);
FT_API int ft_recv(ft_job* job, ft_comm comm, void* data, uint64_t bytes, int32_t src, int64_t tag, ft_request** out);
FT_API int ft_agree(ft_job* job, ft_comm comm, int64_t flag, ft_request** out);
FT_API int ft_shrink(ft_job* job, ft_comm comm, ft_request** out);
FT_API int ft_join_wait(ft_job* job, ft_request** out);
FT_API int ft_admit(ft_job* job, ft_request** out);

/* timeout < 0: until done. FT_INTERRUPTED when a signal came (call again, or ft_request_fail). FT_TIMEOUT with nothing
 * decided: the request is still pending. FT_PEER_FAILURE with ft_request_test saying "not done": a receive from FT_ANY, and a
 * death that is not acknowledged; still pending, wait again after ft_comm_ack_failed (one from FT_ANY_OR_FAIL is done then).
 * Otherwise the operation's own result. */
FT_API int ft_request_wait(ft_request* request, double timeout);
typedef struct {
    int32_t source;
    uint64_t bytes, epoch;
    int64_t value;
    uint64_t new_comm;
    int32_t chunks;              /* number of chunks of the outcome */
    uint64_t offset, count;      /* of the first chunk; its ranks are those of ft_request_ranks if it is the only one */
} ft_result;
/* ft_request_wait, and on FT_OK what ft_request_result and ft_request_ranks give: one call for what nearly every operation needs. */
FT_API int ft_request_finish(ft_request* request, double timeout, ft_result* out, uint8_t* flags, size_t size);
typedef struct {
    ft_request* request;         /* NULL, or the caller's to wait for, to ask and to free */
    uint64_t epoch, offset, count, bytes;
    int32_t chunks; /* 0 or 1: of all ranks, or of `only`; more (all-gather): part i is rank i's, all have `count` elements */
    int32_t only; /* the rank whose data it is (broadcast), or -1 */
    int32_t source;
} ft_now;
/* The call of the same name without _now, ft_request_wait, and ft_request_free where it went as nearly always: FT_OK, at most one chunk,
 * with the data of all ranks, and no request. Else the request is in *out, if it was posted, and the code is that of ft_request_wait, or
 * FT_LOOK: it is done, look what it gave. (A broadcast has the data of its root, and an all-gather a chunk for each rank.) */
#define FT_LOOK (-1)
FT_API int ft_collective_now(ft_job* job, ft_comm comm, const ft_op* op, double timeout, ft_now* out);
FT_API int ft_send_now(ft_job* job, ft_comm comm, const void* data, uint64_t bytes, int32_t dst, int64_t tag, double timeout,
                       ft_now* out);
FT_API int ft_recv_now(ft_job* job, ft_comm comm, void* data, uint64_t bytes, int32_t src, int64_t tag, double timeout,
                       ft_now* out);
FT_API int ft_request_test(ft_request* request, int32_t* done); /* result code when done; FT_CLOSED: it never will be */
FT_API int ft_request_fail(ft_request* request, int32_t why /* FT_INTERRUPTED or FT_TIMEOUT or FT_CANCELLED */);
/* fn(context) runs once, on a library thread or at once on this one when already done. */
FT_API int ft_request_on_done(ft_request* request, void (*fn)(void* context), void* context);
FT_API void ft_request_free(ft_request* request); /* an undone operation goes on without it */

FT_API int ft_request_result(ft_request* request, ft_result* out);
/* flags[size]: intersection of contributors (collectives), survivors (shrink, admit: slots). */
FT_API int ft_request_ranks(ft_request* request, uint8_t* flags, size_t size);
FT_API int ft_request_chunk(ft_request* request, int32_t index, uint64_t* offset, uint64_t* count, uint8_t* flags, size_t size);

FT_API const char* ft_last_error(void); /* JSON of this thread's last error, "" if none */
FT_API size_t ft_dtype_size(int32_t dtype);
FT_API int ft_reduce_supported(int32_t dtype, int32_t op);
/* Of the sizes, and of the first and last cache line of each: whether two ranks have the same, nearly for nothing. */
FT_API uint32_t ft_sample(const void* const* data, const size_t* bytes, size_t count);
FT_API uint32_t ft_crc32c(const void* data, uint64_t bytes, uint32_t seed); /* seed: the checksum of what came before, or 0 */
FT_API const char* ft_logs_place(void); /* where the policy replay's logs are without a log_dir and a launcher */
FT_API void ft_remove_old_logs(void); /* there: of the runs that nobody uses */
FT_API const char* ft_version(void);
FT_API const char* ft_build_info(void); /* JSON: compiler, CPU features, transports */
FT_API const char* ft_fault_points(void); /* JSON: [{"name":..., "where":...}] */
FT_API void ft_fault_step(uint64_t step); /* a training step begins: the point "step" */
FT_API int ft_fault_hit(const char* name); /* points in Python code; 1: corrupt, 2: cut */
FT_API const char* ft_fault_missed(void); /* JSON: [{"at":..., "passes":...}], those set that never came */
FT_API int ft_fault_configure(const char* spec, int32_t rank, int32_t incarnation);

#ifdef __cplusplus
}
#endif
#endif

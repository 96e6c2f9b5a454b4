// Kernels of a decoding step on a CPU; cpu_kernels.py calls them and documents arguments and shapes.
//
// A plain C interface that needs neither torch's headers, which take half a minute to compile, nor the C++ runtime.
// Arithmetic is float32 on vectors of the compiler (GCC's vector extensions, which Clang has too). Threads are those of
// the OpenMP runtime that torch has loaded: the caller passes its GOMP_parallel, and work is dealt by a shared counter.
// Results depend neither on the number of threads nor on the other rows of a batch.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX512BW__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int L = 16;       // lanes of a vector
constexpr int QUERIES = 4;  // most queries of a KV head at once: as many as fit in the registers
#elif defined(__AVX__)
constexpr int L = 8;
constexpr int QUERIES = 3;
#else
constexpr int L = 4;
constexpr int QUERIES = 3;
#endif
constexpr int SPAN = 128;       // a long row is split into spans of about so many keys
constexpr int MOST_KEYS = 192;  // of a span
constexpr int TILE = 32;        // keys whose values are added up in registers; a multiple of L
constexpr int AHEAD = 8;        // keys between an access and its prefetch
// Elements from which waking threads pays. They gain little before, and where other processes keep the cores busy, a
// parallel operation may wait a time slice for its last thread.
constexpr int64_t MANY = 1 << 16;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int OK = 0, NO_MEMORY = 1, OUTSIDE = 2;

typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));

struct bfloat16 {
    uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

INLINE vf all(float x) { return x - vf{}; }
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }

INLINE vf load(const float* from) {
    vf x;
    memcpy(&x, from, sizeof x);
    return x;
}
INLINE vf load(const bfloat16* from) {
    vh x;
    memcpy(&x, from, sizeof x);
    return (vf)(__builtin_convertvector(x, vu) << 16);
}
INLINE void store(float* to, vf x) { memcpy(to, &x, sizeof x); }
INLINE void store(bfloat16* to, vf x) {  // to the nearest, ties to even, as torch rounds
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vh rounded = __builtin_convertvector(x == x ? bits : vu{} + 0x7fc0, vh);
    memcpy(to, &rounded, sizeof rounded);
}
// The first n lanes, for sizes that are no multiple of a vector; the others are 0 and not stored.
template <class T>
INLINE vf load(const T* from, int64_t n) {
    if (n >= L) return load(from);
    T part[L] = {};
    for (int64_t i = 0; i < n; ++i) part[i] = from[i];
    return load(part);
}
template <class T>
INLINE void store(T* to, vf x, int64_t n) {
    if (n >= L) return store(to, x);
    T part[L];
    store(part, x);
    for (int64_t i = 0; i < n; ++i) to[i] = part[i];
}
template <class T>
INLINE vf rounded(vf x) {
    T part[L];
    store(part, x);
    return load(part);
}
template <>
INLINE vf rounded<float>(vf x) {
    return x;
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// f of neighbouring lanes in each 128 bits: of a, then of b. In two steps, four vectors become one whose 128 bits each
// have one result per vector. Shuffles inside of 128 bits are the cheap ones.
template <class F>
INLINE vf join_lanes(vf a, vf b, const F& f) {
#if defined(__AVX512F__)
    return f(PICK(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
             PICK(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
#elif defined(__AVX__)
    return f(PICK(a, b, 0, 2, 8, 10, 4, 6, 12, 14), PICK(a, b, 1, 3, 9, 11, 5, 7, 13, 15));
#else
    return f(PICK(a, b, 0, 2, 4, 6), PICK(a, b, 1, 3, 5, 7));
#endif
}

// f of neighbouring 128 bits: of a, then of b.
template <class F>
INLINE vf join_quarters(vf a, vf b, const F& f) {
#if defined(__AVX512F__)
    return f(PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
             PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#elif defined(__AVX__)
    return f(PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11), PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
#else
    return a;
#endif
}

INLINE vf plus(vf a, vf b) { return a + b; }

// f of all lanes, in each lane.
template <class F>
INLINE vf reduced(vf x, const F& f) {
    x = join_lanes(x, x, f);
    x = join_lanes(x, x, f);
    for (int n = 4; n < L; n *= 2) x = join_quarters(x, x, f);
    return x;
}
INLINE float sum(vf x) { return reduced(x, plus)[0]; }

// e^x by 2^n e^r with |r| <= ln(2) / 2 and the polynomial of Cephes' expf: 1e-7 relative. 0 below the normal numbers,
// infinity from 2^127 on; NaN stays NaN.
INLINE vf exp(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vf shifted = x * 1.44269504088896341f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vf power = (vf)(((vi)shifted - 0x4b400000 + 127) << 23);
    vf result = x > 88.02f ? all(INF) : p * power;
    return x < -87.33f ? vf{} : result;
}

// Cephes' tanhf, 1e-7 relative.
INLINE vf tanh(vf x) {
    vf size = x < 0.0f ? -x : x, z = x * x;
    vf p = all(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf small = p * z * x + x;
    vf large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    large = x < 0.0f ? -large : large;
    return size < 0.625f ? small : large;
}

// -- threads

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel

struct Threads {
    Parallel parallel;
    int count;
};

// Calls body(first, last) for parts of 0..total, each `grain` long, from all threads or from this one.
template <class F>
void deal(Threads threads, bool many, int64_t total, int64_t grain, const F& body) {
    if (threads.count <= 1 || !many || total <= grain) return body(int64_t{0}, total);
    struct Shared {
        const F& body;
        int64_t total, grain;
        std::atomic<int64_t> next;
    } shared{body, total, grain, {0}};
    auto work = [](void* data) {
        auto& mine = *static_cast<Shared*>(data);
        for (;;) {
            int64_t first = mine.next.fetch_add(mine.grain, std::memory_order_relaxed);
            if (first >= mine.total) return;
            int64_t last = first + mine.grain;
            mine.body(first, last < mine.total ? last : mine.total);
        }
    };
    threads.parallel(work, &shared, static_cast<unsigned>(threads.count), 0);
}

// Parts for a few turns of each thread.
int64_t grain_of(Threads threads, int64_t total) {
    int64_t grain = total / (4 * int64_t{threads.count});
    return grain > 0 ? grain : 1;
}

// -- attention

template <class T>
struct Attention {
    const T *queries, *keys, *values;
    const int32_t* blocks;
    const int64_t* positions;
    const float *bias, *sinks;  // null: none
    T* out;
    int64_t batch, heads, kv_heads, d, stride, blocks_of_row, block_tokens, cache_blocks, bias_width, window, chunked;
    float scale, softcap;  // softcap 0: none
};

// Keys first..first + count - 1 of a row. `part`: where the result of the span is kept; -1: it is the whole row.
struct Task {
    int64_t row, first, part;
    int32_t count;
};

// What the spans of a row share. The last one to end combines them.
struct Row {
    int64_t part;
    int32_t parts;
    std::atomic<int32_t> pending;
};

// Per thread. Sizes are multiples of a vector.
struct Scratch {
    float *queries, *scores, *mixed;         // [A, d_pad], [A, MOST_KEYS], [A, d_pad]
    int64_t offsets[MOST_KEYS + AHEAD + L];  // elements of the cache before a token; the last one repeated
};

INLINE int64_t padded(int64_t n) { return (n + L - 1) / L * L; }

// Keeps a vector in a register: compilers would rather read it again for each use, and loads are what limits the loops.
INLINE void keep(vf& x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
}

// Adds products of G queries and 4 keys to sums, for the dimensions of one vector.
template <class T, int G>
INLINE void multiply(const float* queries, int64_t d_pad, const T* const (&keys)[4], int64_t c, int64_t left,
                     vf (&sums)[4][G]) {
    vf query[G];
    for (int g = 0; g < G; ++g) query[g] = load(queries + g * d_pad + c);
    for (int i = 0; i < 4; ++i) {
        vf key = load(keys[i] + c, left);
        keep(key);
        for (int g = 0; g < G; ++g) sums[i][g] += key * query[g];
    }
}

// Scores of L keys and G queries: out[g * MOST_KEYS + i]. Keys past n are copies of the last one. WHOLE: d is a
// multiple of a vector.
template <class T, int G, bool WHOLE>
INLINE void score(const float* queries, int64_t d_pad, const T* keys, const int64_t* offsets, int n, int64_t d,
                  float* out) {
    vf part[G][L / 4];
    for (int four = 0; four < L; four += 4) {
        const T *k[4], *later[4];
        for (int i = 0; i < 4; ++i) k[i] = keys + offsets[four + i], later[i] = keys + offsets[four + i + AHEAD];
        vf sums[4][G];
        for (int i = 0; i < 4; ++i)
            for (int g = 0; g < G; ++g) sums[i][g] = vf{};
        int64_t c = 0;
        if (four < n)
            for (; c + L <= d; c += L) {
                for (int i = 0; i < 4; ++i) __builtin_prefetch(later[i] + c);
                multiply<T, G>(queries, d_pad, k, c, L, sums);
            }
        if (!WHOLE && four < n) multiply<T, G>(queries, d_pad, k, c, d - c, sums);
        for (int g = 0; g < G; ++g)
            part[g][four / 4] =
                join_lanes(join_lanes(sums[0][g], sums[1][g], plus), join_lanes(sums[2][g], sums[3][g], plus), plus);
    }
    for (int g = 0; g < G; ++g) {
        for (int left = L / 4; left > 1; left /= 2)
            for (int i = 0; i < left / 2; ++i) part[g][i] = join_quarters(part[g][2 * i], part[g][2 * i + 1], plus);
        store(out + g * MOST_KEYS, part[g][0]);
    }
}

// Adds weight * value of n keys to mixed [G, d_pad], N vectors from c on.
template <class T, int G, int N>
INLINE void mix(const float* weights, const T* values, const int64_t* offsets, int n, int64_t d_pad, int64_t c,
                int64_t left, float* mixed) {
    vf sums[G][N];
    for (int g = 0; g < G; ++g)
        for (int j = 0; j < N; ++j) sums[g][j] = load(mixed + g * d_pad + c + j * L);
    for (int i = 0; i < n; ++i) {
        const T* from = values + offsets[i] + c;
        const T* later = values + offsets[i + AHEAD] + c;
        for (int j = 0; j < N * L; j += 64 / (int)sizeof(T)) __builtin_prefetch(later + j);
        for (int j = 0; j < N; ++j) {
            vf value = N == 1 ? load(from, left) : load(from + j * L);
            keep(value);
            for (int g = 0; g < G; ++g) sums[g][j] += weights[g * MOST_KEYS + i] * value;
        }
    }
    for (int g = 0; g < G; ++g)
        for (int j = 0; j < N; ++j) store(mixed + g * d_pad + c + j * L, sums[g][j]);
}

template <class T, int G>
void score_all(const float* queries, int64_t d_pad, const T* keys, const int64_t* offsets, int n, int64_t d,
               float* out) {
    if (d % L == 0) return score<T, G, true>(queries, d_pad, keys, offsets, n, d, out);
    return score<T, G, false>(queries, d_pad, keys, offsets, n, d, out);
}

template <class T, int G>
void mix_all(const float* weights, const T* values, const int64_t* offsets, int n, int64_t d, int64_t d_pad,
             float* mixed) {
    constexpr int N = L == 16 || G == 1 ? 4 : 2;
    int64_t c = 0;
    for (; c + N * L <= d; c += N * L) mix<T, G, N>(weights, values, offsets, n, d_pad, c, L, mixed);
    for (; c < d; c += L) mix<T, G, 1>(weights, values, offsets, n, d_pad, c, d - c, mixed);
}

// Calls body.template run<G>(head) for groups of 1 to QUERIES heads that share a KV head, as even as possible.
template <class F>
INLINE void for_groups(int64_t head, int64_t group, const F& body) {
    for (int64_t left = (group + QUERIES - 1) / QUERIES; left > 0; --left) {
        int64_t size = (group + left - 1) / left;
        if (size == 1) body.template run<1>(head);
        if (size == 2) body.template run<2>(head);
        if (size == 3) body.template run<3>(head);
        if (size == 4) body.template run<4>(head);
        head += size, group -= size;
    }
}

template <class T>
struct ScoreGroup {
    const Scratch& s;
    const T* keys;
    int first, n;
    int64_t d, d_pad;
    template <int G>
    INLINE void run(int64_t head) const {
        score_all<T, G>(s.queries + head * d_pad, d_pad, keys, s.offsets + first, n, d,
                        s.scores + head * MOST_KEYS + first);
    }
};

template <class T>
struct MixGroup {
    const Scratch& s;
    const T* values;
    int first, n;
    int64_t d, d_pad;
    template <int G>
    INLINE void run(int64_t head) const {
        mix_all<T, G>(s.scores + head * MOST_KEYS + first, values, s.offsets + first, n, d, d_pad,
                      s.mixed + head * d_pad);
    }
};

// Scores of a head to weights e^(score - top); returns their sum.
float weigh(float* scores, int n, float softcap, const float* bias, float* top) {
    if (softcap != 0.0f)
        for (int i = 0; i < n; i += L) store(scores + i, softcap * tanh(load(scores + i) / softcap));
    if (bias != nullptr)
        for (int i = 0; i < n; i += L) store(scores + i, load(scores + i) + load(bias + i, n - i));
    for (int i = n; i < padded(n); ++i) scores[i] = -INF;
    vf best = all(-INF);
    for (int i = 0; i < n; i += L) best = larger(best, load(scores + i));
    float most = *top = reduced(best, larger)[0];
    float shift = most == -INF ? 0.0f : most;  // no key with weight
    vf total = {};
    for (int i = 0; i < n; i += L) {
        vf weight = exp(load(scores + i) - shift);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

// Writes offsets of the cache for the keys of a task; false if a block is not one of the cache.
template <class T>
bool locate(const Attention<T>& a, const Task& task, int64_t* offsets) {
    const int32_t* blocks = a.blocks + task.row * a.blocks_of_row;
    int64_t position = task.first;
    for (int i = 0; i < task.count;) {
        int64_t block = blocks[position / a.block_tokens], inside = position % a.block_tokens;
        if (block < 0 || block >= a.cache_blocks) return false;
        for (; inside < a.block_tokens && i < task.count; ++inside, ++i, ++position)
            offsets[i] = (block * a.block_tokens + inside) * a.stride;
    }
    for (int i = task.count; i < task.count + AHEAD + L; ++i) offsets[i] = offsets[task.count - 1];
    return true;
}

// Sums the parts of a head in their order, with the weight e^(top - highest top), and the sink. Overwrites tops.
template <class T>
void finish_head(const Attention<T>& a, int64_t row, int64_t head, float* parts, int32_t count, int64_t stride,
                 int64_t d_pad) {
    float* tops = parts + a.heads * d_pad + head;
    const float* sums = tops + a.heads;
    float total = sums[0];
    if (count == 1 && a.sinks == nullptr) {
        tops[0] = 1.0f;
    } else {
        float top = a.sinks == nullptr ? -INF : a.sinks[head];
        for (int32_t i = 0; i < count; ++i) top = tops[i * stride] > top ? tops[i * stride] : top;
        float shift = top == -INF ? 0.0f : top;
        total = a.sinks == nullptr ? 0.0f : exp(all(a.sinks[head] - shift))[0];
        for (int32_t i = 0; i < count; ++i) {
            tops[i * stride] = exp(all(tops[i * stride] - shift))[0];
            total += tops[i * stride] * sums[i * stride];
        }
    }
    for (int64_t c = 0; c < a.d; c += L) {
        vf mixed = {};
        for (int32_t i = 0; i < count; ++i) mixed += tops[i * stride] * load(parts + i * stride + head * d_pad + c);
        store(a.out + (row * a.heads + head) * a.d + c, mixed / total, a.d - c);
    }
}

// One span of a row, for all its heads, so that blocks are read as they lie in memory. The result goes to `part`: mixed
// values [A, d_pad], then the highest score [A] and the sum of weights [A] of each head.
template <class T>
bool attend(const Attention<T>& a, const Task& task, Scratch& s, float* part) {
    int64_t d_pad = padded(a.d), group = a.heads / a.kv_heads;
    if (!locate(a, task, s.offsets)) return false;
    s.mixed = part;
    memset(part, 0, a.heads * d_pad * sizeof(float));
    for (int64_t h = 0; h < a.heads; ++h)
        for (int64_t c = 0; c < a.d; c += L)
            store(s.queries + h * d_pad + c, load(a.queries + (task.row * a.heads + h) * a.d + c, a.d - c) * a.scale);
    for (int first = 0; first < task.count; first += L) {
        int n = task.count - first;
        for (int64_t k = 0; k < a.kv_heads; ++k)
            for_groups(k * group, group, ScoreGroup<T>{s, a.keys + k * a.d, first, n < L ? n : L, a.d, d_pad});
    }
    for (int64_t h = 0; h < a.heads; ++h) {
        const float* bias = a.bias == nullptr ? nullptr : a.bias + h * a.bias_width + task.first;
        float* top = part + a.heads * d_pad + h;
        top[a.heads] = weigh(s.scores + h * MOST_KEYS, task.count, a.softcap, bias, top);
    }
    for (int first = 0; first < task.count; first += TILE) {
        int n = task.count - first;
        for (int64_t k = 0; k < a.kv_heads; ++k)
            for_groups(k * group, group, MixGroup<T>{s, a.values + k * a.d, first, n < TILE ? n : TILE, a.d, d_pad});
    }
    return true;
}

// The first key that a token attends to; the window begins at the last multiple of its size if it is chunked.
template <class T>
int64_t first_key(const Attention<T>& a, int64_t position) {
    if (a.window <= 0 || position < a.window) return 0;
    return a.chunked ? position / a.window * a.window : position + 1 - a.window;
}

// Splits rows into spans, the longest first so that threads end at about the same time. Returns their number.
// `tasks` may be null, to count only.
template <class T>
int64_t split(const Attention<T>& a, Task* tasks, Row* rows, int64_t* parts) {
    int64_t begin[MOST_KEYS + 2] = {}, count = 0;
    *parts = 0;
    for (int pass = tasks == nullptr ? 1 : 0; pass < 2; ++pass) {
        for (int64_t b = 0; b < a.batch; ++b) {
            int64_t end = a.positions[b] + 1, first = first_key(a, end - 1);
            int64_t length = end - first, spans = (length + SPAN / 2) / SPAN;
            if (spans < 1) spans = 1;
            if (pass == 1 && spans > 1) {
                if (tasks != nullptr) rows[b].part = *parts, rows[b].parts = spans, rows[b].pending.store(spans);
                *parts += spans;
            }
            for (int64_t i = 0; i < spans; ++i) {
                int64_t start = i * length / spans, n = (i + 1) * length / spans - start;
                if (pass == 0)
                    ++begin[MOST_KEYS - n + 1];
                else if (tasks == nullptr)
                    ++count;
                else
                    tasks[begin[MOST_KEYS - n]++] =
                        Task{b, first + start, spans > 1 ? *parts - spans + i : -1, (int32_t)n},
                                            ++count;
            }
        }
        if (pass == 0)
            for (int i = 1; i < MOST_KEYS + 2; ++i) begin[i] += begin[i - 1];
    }
    return count;
}

template <class T>
int attention(const Attention<T>& a, Threads threads) {
    int64_t total = 0;
    for (int64_t b = 0; b < a.batch; ++b) {
        if (a.positions[b] < 0 || a.positions[b] >= a.blocks_of_row * a.block_tokens) return OUTSIDE;
        if (a.bias != nullptr && a.positions[b] >= a.bias_width) return OUTSIDE;
        total += a.positions[b] + 1;
    }
    int64_t parts, tasks = split<T>(a, nullptr, nullptr, &parts), d_pad = padded(a.d), stride = a.heads * (d_pad + 2);
    int64_t per_thread = a.heads * (d_pad + MOST_KEYS + L) + stride;
    // One piece of memory: rows, tasks, parts of long rows, then what each thread needs.
    size_t bytes =
        a.batch * sizeof(Row) + tasks * sizeof(Task) + (parts * stride + threads.count * per_thread) * sizeof(float);
    char* memory = static_cast<char*>(malloc(bytes));
    if (memory == nullptr) return NO_MEMORY;
    Row* rows = reinterpret_cast<Row*>(memory);
    Task* queue = reinterpret_cast<Task*>(rows + a.batch);
    float* kept = reinterpret_cast<float*>(queue + tasks);
    float* own = kept + parts * stride;
    split(a, queue, rows, &parts);
    std::atomic<int> workers{0}, next{0}, failed{0};
    auto work = [&](int64_t, int64_t) {
        Scratch s;
        s.queries = own + workers.fetch_add(1) * per_thread;
        s.scores = s.queries + a.heads * d_pad;
        float* whole = s.scores + a.heads * MOST_KEYS + L;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const Task& task = queue[i];
            if (!attend(a, task, s, task.part < 0 ? whole : kept + task.part * stride)) {
                failed.store(1);
                continue;
            }
            if (task.part < 0) {
                for (int64_t h = 0; h < a.heads; ++h) finish_head(a, task.row, h, whole, 1, stride, d_pad);
            } else if (Row& row = rows[task.row]; row.pending.fetch_sub(1) == 1) {
                for (int64_t h = 0; h < a.heads; ++h)
                    finish_head(a, task.row, h, kept + row.part * stride, row.parts, stride, d_pad);
            }
        }
    };
    deal(threads, tasks > 1 && total * a.heads * a.d >= 2 * MANY, threads.count, 1, work);
    free(memory);
    return failed.load() ? OUTSIDE : OK;
}

// -- norms

template <class T, class W>
struct Norm {
    const T *x, *delta;  // delta null: none
    const W* weight;
    T *added, *normed;
    int64_t rows, inner, outer_stride, inner_stride, width;  // row i of x is at i / inner, i % inner
    float eps;
    bool in_float32;
};

template <class T, class W>
void norm_row(const Norm<T, W>& a, int64_t row) {
    const T* x = a.x + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
    T *added = a.added + row * a.width, *normed = a.normed + row * a.width;
    vf squares[4] = {};
    for (int64_t c = 0, k = 0; c < a.width; c += L, k = (k + 1) & 3) {
        vf v = load(x + c, a.width - c);
        if (a.delta != nullptr) {
            v = rounded<T>(v + load(a.delta + row * a.width + c, a.width - c));
            store(added + c, v, a.width - c);
        }
        squares[k] += v * v;
    }
    float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / a.width;
    float factor = 1.0f / std::sqrt(mean + a.eps);
    if (a.delta != nullptr) x = added;
    for (int64_t c = 0; c < a.width; c += L) {
        vf v = load(x + c, a.width - c) * factor;
        if (!a.in_float32) v = rounded<T>(v);
        store(normed + c, v * load(a.weight + c, a.width - c), a.width - c);
    }
}

template <class T, class W>
int norm(const Norm<T, W>& a, Threads threads) {
    deal(threads, a.rows * a.width >= MANY, a.rows, grain_of(threads, a.rows), [&](int64_t row, int64_t end) {
        for (; row < end; ++row) norm_row(a, row);
    });
    return OK;
}

// -- products: a tile is some rows of x and TILE_OUTPUTS outputs, whose sums are in registers

constexpr int TILE_OUTPUTS = 48;            // cpu_kernels.py knows it
constexpr int VECTORS = TILE_OUTPUTS / L;   // of a tile's outputs
constexpr int TILE_ROWS = L == 16 ? 8 : 2;  // as many rows of x as have their sums in registers
constexpr int BLOCK_TILES = 16;             // tiles of rows that pass over the same weights before others are read
constexpr int64_t MANY_PRODUCTS = 1 << 18;  // as MANY; in int8 four times as many

// The tiles of rows have sizes that differ by 1 at most.
struct Tiles {
    int64_t rows, count;
    Tiles(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t first(int64_t tile) const { return rows * tile / count; }
};

// Calls body with a number of rows of a tile as a constant.
template <int ROWS, class F>
void with_rows(int64_t rows, const F& body) {
    if (rows == ROWS) return body(std::integral_constant<int, ROWS>{});
    if constexpr (ROWS > 1) with_rows<ROWS - 1>(rows, body);
}

struct Product {
    const float *x, *weight;  // weight: [tiles of outputs, inputs, TILE_OUTPUTS], filled up with zeros
    const float* bias;        // null: none
    float* out;
    int64_t rows, inputs, outputs;
};

template <int ROWS>
void product_tile(const Product& a, int64_t row, int64_t tile) {
    constexpr int WEIGHTS_AHEAD = 40 * TILE_OUTPUTS;  // memory answers within about 40 inputs
    const float *x = a.x + row * a.inputs, *weight = a.weight + tile * a.inputs * TILE_OUTPUTS;
    vf sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < a.inputs; ++k, weight += TILE_OUTPUTS) {
        vf own[VECTORS];
        for (int v = 0; v < VECTORS; ++v) own[v] = load(weight + v * L);
        for (int i = 0; i < TILE_OUTPUTS; i += 16) __builtin_prefetch(weight + WEIGHTS_AHEAD + i);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += x[r * a.inputs + k] * own[v];
    }
    for (int v = 0; v < VECTORS; ++v) {
        int64_t n = tile * TILE_OUTPUTS + v * L, left = a.outputs - n;
        if (left <= 0) return;
        vf bias = a.bias == nullptr ? vf{} : load(a.bias + n, left);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) store(a.out + (row + r) * a.outputs + n, sums[r][v] + bias, left);
    }
}

// Weights [outputs, inputs] in the order of a product.
struct Packing {
    const float* weight;
    float* packed;
    int64_t inputs, outputs;
};

int pack(const Packing& a, Threads threads) {
    constexpr int64_t PART = 64;  // inputs at a time, so that lines are read and written once
    int64_t tiles = Tiles(a.outputs, TILE_OUTPUTS).count;
    deal(threads, a.inputs * a.outputs >= MANY, tiles, 1, [&](int64_t tile, int64_t end) {
        for (; tile < end; ++tile)
            for (int64_t begin = 0; begin < a.inputs; begin += PART)
                for (int64_t i = 0, n = tile * TILE_OUTPUTS; i < TILE_OUTPUTS; ++i, ++n)
                    for (int64_t k = begin; k < begin + PART && k < a.inputs; ++k)
                        a.packed[(tile * a.inputs + k) * TILE_OUTPUTS + i] =
                            n < a.outputs ? a.weight[n * a.inputs + k] : 0.0f;
    });
    return OK;
}

int product(const Product& a, Threads threads) {
    Tiles tiles(a.rows, TILE_ROWS);
    int64_t of_outputs = Tiles(a.outputs, TILE_OUTPUTS).count, blocks = (tiles.count + BLOCK_TILES - 1) / BLOCK_TILES;
    deal(threads, a.rows * a.inputs * a.outputs >= MANY_PRODUCTS, blocks * of_outputs, 1, [&](int64_t i, int64_t end) {
        for (; i < end; ++i) {
            int64_t tile = i / of_outputs * BLOCK_TILES, last = tile + BLOCK_TILES;
            for (; tile < last && tile < tiles.count; ++tile) {
                int64_t first = tiles.first(tile);
                with_rows<TILE_ROWS>(tiles.first(tile + 1) - first,
                                     [&](auto rows) { product_tile<rows.value>(a, first, i % of_outputs); });
            }
        }
    });
    return OK;
}

// -- weights in 4 bits

template <class T>
struct FourBit {
    const uint8_t *codes, *scale_codes;  // two weights per byte, the first in the high bits; a scale code per block
    const float *levels, *scale_levels, *scale_scales;  // of the 16 codes, of the 256 scale codes, per block of scales
    T* out;
    int64_t weights, block, scale_block;
    float scale_offset;
    bool narrow;  // round to bfloat16 also in float32
};

// Weights 2 i to 2 n from bytes i to n, given the value of each code.
template <class T>
INLINE void look_up_from(int64_t i, const T* values, const uint8_t* codes, int64_t n, T* out) {
    for (; i < n; ++i) {
        out[2 * i] = values[codes[i] >> 4];
        out[2 * i + 1] = values[codes[i] & 15];
    }
}

// 2 n weights from n bytes.
template <class T>
INLINE void look_up(const T* values, const uint8_t* codes, int64_t n, T* out) {
    look_up_from(0, values, codes, n, out);
}
#if defined(__AVX512BW__)
template <>
INLINE void look_up(const bfloat16* values, const uint8_t* codes, int64_t n, bfloat16* out) {
    __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values));  // twice: 5 bits are looked up
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + i)));
        __m512i places = _mm512_or_si512(_mm512_srli_epi32(pairs, 4), _mm512_slli_epi32(pairs, 16));
        _mm512_storeu_si512(out + 2 * i, _mm512_permutexvar_epi16(places, table));
    }
    look_up_from(i, values, codes, n, out);
}
#endif

template <class T>
int dequantise(const FourBit<T>& a, Threads threads) {
    constexpr int64_t BLOCKS = 64;  // at a time
    int64_t blocks = (a.weights + a.block - 1) / a.block;
    deal(threads, a.weights >= MANY, blocks, BLOCKS, [&](int64_t block, int64_t end) {
        for (; block < end; ++block) {
            // rounded before the sum, as in training: the weights are the same bit for bit
            volatile float product = a.scale_levels[a.scale_codes[block]] * a.scale_scales[block / a.scale_block];
            float scale = product + a.scale_offset;
            T values[16];
            for (int64_t i = 0; i < 16; i += L) {
                vf level = load(a.levels + i) * scale;
                store(values + i, a.narrow ? rounded<bfloat16>(level) : level);
            }
            int64_t first = block * a.block, count = a.weights - first;
            look_up(values, a.codes + first / 2, (count < a.block ? count : a.block) / 2, a.out + first);
        }
    });
    return OK;
}

// -- products in int8

constexpr int INT8_OUTPUTS = 32;  // as TILE_OUTPUTS, and what follows
constexpr int INT8_VECTORS = INT8_OUTPUTS / L;
constexpr int INT8_ROWS = L == 16 ? 12 : 3;

template <class T>
struct Int8Product {
    const T* x;
    const int8_t* weight;   // [tiles of outputs, inputs / 4, INT8_OUTPUTS, 4], filled up with zeros
    const int32_t* offset;  // [outputs], 128 times the sum of an output's weights
    const float *scale, *bias;
    T* out;
    int64_t rows, inputs, outputs;
    int64_t quads() const { return (inputs + 3) / 4; }
};

// Codes of a row, 128 more than those in int8, which makes them positive as the processor's instruction requires.
template <class T>
float quantise_row(const T* x, int64_t inputs, uint8_t* codes, int64_t stride) {
    vi most = {};
    for (int64_t c = 0; c < inputs; c += L) {
        vi size = (vi)load(x + c, inputs - c) & 0x7fffffff;  // in the order of the floats; NaN is above all
        most = size > most ? size : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < L; ++i) bits = most[i] > bits ? most[i] : bits;
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    if (largest < 1e-30f) largest = 1e-30f;
    const float factor = 127.0f / largest, magic = 12582912.0f;  // 1.5 * 2^23 rounds, ties to even
    for (int64_t c = 0; c < inputs; c += L) {
        vf shifted = load(x + c, inputs - c) * factor + magic;
        vi code = (vi)shifted - 0x4b400000 + 128;
        for (int i = 0; i < L && c + i < inputs; i += 4) {
            uint8_t quad[4] = {(uint8_t)code[i], (uint8_t)code[i + 1], (uint8_t)code[i + 2], (uint8_t)code[i + 3]};
            memcpy(codes + (c + i) / 4 * stride, quad, 4);
        }
    }
    return largest / 127.0f;
}

INLINE vi load_codes(const int8_t* from) {
    vi x;
    memcpy(&x, from, sizeof x);
    return x;
}

// sum + the four products of bytes in each lane.
INLINE vi dot(vi sum, vi codes, vi weights) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)weights);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)weights);
#else
    for (int shift = 24; shift >= 0; shift -= 8)
        sum += ((vi)(((vu)codes << shift) >> 24)) * ((vi)((vu)weights << shift) >> 24);
    return sum;
#endif
}

template <int ROWS, class T>
void int8_tile(const Int8Product<T>& a, const uint8_t* codes, const float* scales, int64_t row, int64_t tile) {
    const int8_t* weight = a.weight + tile * a.quads() * INT8_OUTPUTS * 4;
    vi sums[ROWS][INT8_VECTORS] = {};  // in registers: all that reads it is unrolled
    for (int64_t q = 0, quads = a.quads(); q < quads; ++q, codes += 4 * ROWS, weight += 4 * INT8_OUTPUTS) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            int32_t quad;
            memcpy(&quad, codes + 4 * r, sizeof quad);
#pragma GCC unroll 16
            for (int v = 0; v < INT8_VECTORS; ++v)
                sums[r][v] = dot(sums[r][v], quad - vi{}, load_codes(weight + 4 * L * v));
        }
    }
    vi done[ROWS][INT8_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < INT8_VECTORS; ++v) done[r][v] = sums[r][v];
    for (int v = 0; v < INT8_VECTORS; ++v) {
        int64_t n = tile * INT8_OUTPUTS + v * L, left = a.outputs - n;
        if (left <= 0) return;
        vf scale = load(a.scale + n, left), bias = a.bias == nullptr ? vf{} : load(a.bias + n, left);
        vi offset = (vi)load((const float*)a.offset + n, left);
        for (int r = 0; r < ROWS; ++r) {
            vf sum = __builtin_convertvector(done[r][v] - offset, vf) * (scale * scales[r]);
            store(a.out + (row + r) * a.outputs + n, sum + bias, left);
        }
    }
}

template <class T>
int int8_product(const Int8Product<T>& a, Threads threads) {
    if (a.rows == 0) return OK;
    Tiles tiles(a.rows, INT8_ROWS);
    int64_t outputs = Tiles(a.outputs, INT8_OUTPUTS).count;
    int64_t width = 4 * a.quads();  // inputs of a tile: [quads, rows of the tile, 4]
    char* memory = static_cast<char*>(malloc(a.rows * (width + sizeof(float))));
    if (memory == nullptr) return NO_MEMORY;
    float* scales = reinterpret_cast<float*>(memory);
    uint8_t* codes = reinterpret_cast<uint8_t*>(scales + a.rows);
    deal(threads, a.rows * a.inputs >= MANY, tiles.count, 1, [&](int64_t tile, int64_t end) {
        for (; tile < end; ++tile) {
            int64_t first = tiles.first(tile), rows = tiles.first(tile + 1) - first;
            for (int64_t r = 0; r < rows; ++r)
                scales[first + r] =
                    quantise_row(a.x + (first + r) * a.inputs, a.inputs, codes + first * width + 4 * r, 4 * rows);
        }
    });
    bool many = a.rows * a.inputs * a.outputs >= 4 * MANY_PRODUCTS;
    deal(threads, many, outputs, 1, [&](int64_t part, int64_t end) {
        for (; part < end; ++part) {
            for (int64_t tile = 0; tile < tiles.count; ++tile) {
                int64_t first = tiles.first(tile);
                with_rows<INT8_ROWS>(tiles.first(tile + 1) - first, [&](auto rows) {
                    int8_tile<rows.value>(a, codes + first * width, scales + first, first, part);
                });
            }
        }
    });
    free(memory);
    return OK;
}

// -- sampling

constexpr int64_t RUN = 128;            // tokens whose weights are added in float32, as in sampler.py
constexpr int64_t SUMMED = 8 * RUN;     // the same while a bound is searched
constexpr double UNIT = 1ll << 42;      // integer value of a weight of 1; 2^21 of them fit
// Columns of decode_batch.py.
enum Integers { TOKEN, POSITION, DRAWN, TOP_K, GREEDY, MIN_NEW_TOKENS, BIASED, CONSTRAINED, STOPS };
enum Floats { DIVISOR, TOP_P, MIN_P, PENALTY, PRESENCE, FREQUENCY, UNIFORMS };
constexpr uint8_t IN_COMPLETION = 2, SEEN = 3;  // bits of `seen`, as in sampling.py

struct Sampling {
    const float* logits;
    int64_t* integers;
    const double* floats;
    uint8_t* seen;  // null: no row has penalties or biases
    float* bias;    // null: no row has biases, presence or frequency penalties
    const int32_t* allowed;  // bits of tokens; null: no row has a grammar
    int64_t* tokens;
    float *logprobs, *sampling_logprobs;
    int64_t rows, vocabulary, integer_columns, float_columns;
};

// Scores of a row, and what they weigh: e^((score - top) / divisor), by token and summed up to the end of each run.
struct Weighed {
    const float* scores;
    float* weights;
    int64_t* ends;
    int64_t n;
    float divisor, top;
    double log_total;
    int64_t total() const { return ends[(n - 1) / RUN]; }
    float logprob(int64_t token) const {
        return (float)((double)(scores[token] / divisor) - (double)(top / divisor) - log_total);
    }
};

// Weights past the last token are 0. A NaN among the others makes the top NaN, and so all log-probs.
void add_up(Weighed& row) {
    double sum_of_row = 0.0;
    int64_t end = 0;
    for (int64_t first = 0; first < row.n; first += RUN) {
        vf total = {};
        for (int64_t i = first; i < first + RUN && i < row.n; i += L) total += load(row.weights + i);
        double run = sum(total);
        sum_of_row += run;
        row.ends[first / RUN] = end += run == run ? (int64_t)(run * UNIT) : 0;
    }
    row.log_total = std::log(sum_of_row);
    if (sum_of_row != sum_of_row) row.top = NAN;
}

void weigh_tokens(Weighed& row) {
    vf most = all(-INF);
    int64_t i = 0;
    for (; i + L <= row.n; i += L) most = larger(most, load(row.scores + i));
    row.top = reduced(most, larger)[0];
    for (; i < row.n; ++i) row.top = row.scores[i] > row.top ? row.scores[i] : row.top;
    const bool scaled = row.divisor != 1.0f;
    const float top = scaled ? row.top / row.divisor : row.top;
    for (i = 0; i < row.n; i += L) {
        vf score = load(row.scores + i, row.n - i);
        store(row.weights + i, exp((scaled ? score / row.divisor : score) - top));
    }
    for (i = row.n; i < padded(row.n); ++i) row.weights[i] = 0.0f;
    add_up(row);
}

// Floats in the order of integers.
int32_t order_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
float at_order(int32_t order) {
    int32_t bits = order < 0 ? order ^ 0x7fffffff : order;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The tokens whose score is above a bound: how many, and their weight.
struct Above {
    int64_t count;
    double weight;
};

Above above(const Weighed& row, float bound) {
    Above found = {0, 0.0};
    for (int64_t first = 0; first < row.n; first += SUMMED) {
        vi count = {};
        vf weight = {};
        for (int64_t i = first; i < first + SUMMED && i < row.n; i += L) {
            vf score = load(row.scores + i, row.n - i);
            vi more = score > bound;
            if (row.n - i < L)
                for (int64_t past = row.n - i; past < L; ++past) more[past] = 0;
            count -= more;
            weight += (vf)((vi)load(row.weights + i) & more);
        }
        for (int i = 0; i < L; ++i) found.count += count[i];
        found.weight += sum(weight);
    }
    return found;
}

// The lowest bound, from `low` on, of which `holds` is true; it is true of the highest score. By bisection of the
// integers that order floats: 32 passes at most, and no sort.
template <class F>
float lowest_bound(const Weighed& row, float low, const F& holds) {
    int64_t least = order_of(low), most = order_of(row.top);
    while (least < most) {
        int64_t middle = (least + most) >> 1;
        if (holds(above(row, at_order(middle))))
            most = middle;
        else
            least = middle + 1;
    }
    return at_order(least);
}

// Sets the weights of excluded tokens to 0: top_k, then top_p, then min_p. Of equal scores at the bound, as many are
// kept as are needed, those of the lowest tokens.
void truncate(Weighed& row, int64_t top_k, double top_p, double min_p) {
    float bound = -INF;
    int64_t equals = row.n;
    if (top_k > 0 && top_k < row.n) {
        bound = lowest_bound(row, bound, [&](const Above& a) { return a.count < top_k; });
        equals = top_k - above(row, bound).count;
    }
    auto weight_at = [&](float score) { return (double)exp(all(score / row.divisor - row.top / row.divisor))[0]; };
    if (top_p < 1.0) {
        double kept = row.total() / UNIT;
        if (bound > -INF) kept = above(row, bound).weight + equals * weight_at(bound);
        float by_k = bound;
        bound = lowest_bound(row, bound, [&](const Above& a) { return a.weight < top_p * kept; });
        double missing = top_p * kept - above(row, bound).weight, each = weight_at(bound);
        double needed = each > 0.0 ? std::ceil(missing / each) : 1.0;
        needed = needed < 1.0 ? 1.0 : needed;
        if (bound > by_k) equals = row.n;
        equals = needed < equals ? (int64_t)needed : equals;
    }
    for (int64_t i = 0; i < row.n; i += L) {
        vf score = load(row.scores + i, row.n - i), weight = load(row.weights + i);
        store(row.weights + i, score < bound || weight < (float)min_p ? vf{} : weight);
    }
    for (int64_t i = 0; equals < row.n && i < row.n; ++i)
        if (row.scores[i] == bound && --equals < 0) row.weights[i] = 0.0f;
    for (int64_t i = row.n; i < padded(row.n); ++i) row.weights[i] = 0.0f;
    add_up(row);
}

// The token at which the running sum exceeds uniform * total.
int64_t invert(const Weighed& row, double uniform) {
    int64_t total = row.total(), wanted = (int64_t)(uniform * (double)total), run = 0, last = 0;
    wanted = wanted < total ? wanted : total - 1;
    for (int64_t step = int64_t{1} << 20; step > 0; step /= 2)
        if ((run + step - 1) * RUN < row.n && row.ends[run + step - 1] <= wanted) run += step;
    int64_t before = run > 0 ? row.ends[run - 1] : 0;
    for (int64_t i = run * RUN; i < (run + 1) * RUN && i < row.n; ++i) {
        before += (int64_t)(row.weights[i] * UNIT);
        if (before > wanted) return i;
        // A sum of floats may exceed that of the integers in its last digit: the last token with weight then.
        if (row.weights[i] > 0.0f) last = i;
    }
    return last;
}

int64_t first_of(const float* scores, float wanted) {
    int64_t i = 0;
    while (scores[i] != wanted) ++i;
    return i;
}

// Repetition penalty, biases, tokens that the grammar does not allow, and stop tokens that are not allowed yet.
const float* penalised(const Sampling& a, int64_t r, const float* logits, float* scores) {
    const int64_t *row = a.integers + r * a.integer_columns, *end = row + a.integer_columns;
    const float penalty = (float)a.floats[r * a.float_columns + PENALTY];
    const bool repeats = a.seen != nullptr && penalty != 1.0f, early = row[DRAWN] < row[MIN_NEW_TOKENS];
    const bool biased = a.bias != nullptr && row[BIASED];
    const bool constrained = a.allowed != nullptr && row[CONSTRAINED];
    if (!repeats && !biased && !constrained && !early) return logits;
    memcpy(scores, logits, a.vocabulary * sizeof(float));
    const uint8_t* seen = a.seen + r * a.vocabulary;
    for (int64_t i = 0; repeats && i < a.vocabulary; ++i)
        if (seen[i]) scores[i] = scores[i] > 0.0f ? scores[i] / penalty : scores[i] * penalty;
    const float* bias = a.bias + (biased ? r * a.vocabulary : 0);
    for (int64_t i = 0; biased && i < a.vocabulary; ++i) scores[i] += bias[i];
    const int32_t* allowed = a.allowed + (constrained ? r * ((a.vocabulary + 31) / 32) : 0);
    for (int64_t i = 0; constrained && i < a.vocabulary; ++i)
        scores[i] = allowed[i / 32] >> (i % 32) & 1 ? scores[i] : -INF;
    for (const int64_t* stop = row + STOPS; early && stop < end; ++stop) scores[*stop] = -INF;
    return scores;
}

void sample_row(const Sampling& a, int64_t r, float* scores, float* weights, int64_t* ends) {
    int64_t* row = a.integers + r * a.integer_columns;
    const double* floats = a.floats + r * a.float_columns;
    const float* logits = a.logits + r * a.vocabulary;
    Weighed whole{logits, weights, ends, a.vocabulary, (float)floats[DIVISOR], 0.0f, 0.0};
    weigh_tokens(whole);
    Weighed drawn = whole;
    drawn.scores = penalised(a, r, logits, scores);
    if (drawn.scores != logits) weigh_tokens(drawn);
    int64_t token = 0;
    if (whole.top == whole.top && drawn.top == drawn.top) {
        if (row[TOP_K] > 0 || floats[TOP_P] < 1.0 || floats[MIN_P] > 0.0)
            truncate(drawn, row[TOP_K], (float)floats[TOP_P], (float)floats[MIN_P]);
        int64_t place = UNIFORMS + row[DRAWN];
        place = place < a.float_columns ? place : a.float_columns - 1;
        token = row[GREEDY] ? first_of(drawn.scores, drawn.top) : invert(drawn, floats[place]);
    }
    a.tokens[r] = row[TOKEN] = token;
    ++row[POSITION], ++row[DRAWN];
    const int64_t at = r * a.vocabulary + token;
    const float presence = (float)floats[PRESENCE], frequency = (float)floats[FREQUENCY];
    if (a.bias != nullptr) a.bias[at] -= a.seen[at] >= IN_COMPLETION ? frequency : frequency + presence;
    if (a.seen != nullptr) a.seen[at] = SEEN;
    a.logprobs[r] = whole.logprob(token);
    a.sampling_logprobs[r] = drawn.logprob(token);
}

int sample(const Sampling& a, Threads threads) {
    for (int64_t r = 0; r < a.rows; ++r)
        for (int64_t column = STOPS; column < a.integer_columns; ++column)
            if (int64_t stop = a.integers[r * a.integer_columns + column]; stop < 0 || stop >= a.vocabulary)
                return OUTSIDE;
    int64_t width = padded(a.vocabulary), runs = (a.vocabulary + RUN - 1) / RUN;
    int64_t per_thread = 2 * width * sizeof(float) + runs * sizeof(int64_t);
    char* memory = static_cast<char*>(malloc(threads.count * per_thread));
    if (memory == nullptr) return NO_MEMORY;
    std::atomic<int64_t> workers{0}, next{0};
    deal(threads, a.rows > 1 && a.rows * a.vocabulary >= MANY, threads.count, 1, [&](int64_t, int64_t) {
        int64_t* ends = reinterpret_cast<int64_t*>(memory + workers.fetch_add(1) * per_thread);
        float *scores = reinterpret_cast<float*>(ends + runs), *weights = scores + width;
        for (int64_t r; (r = next.fetch_add(1)) < a.rows;) sample_row(a, r, scores, weights, ends);
    });
    free(memory);
    return OK;
}

}  // namespace

// Each function takes one struct of 8-byte fields, which cpu_kernels.py packs: ctypes would take longer to convert
// single arguments than small kernels run. `half`: tensors of the model are bfloat16, not float32. A pointer may be
// null where the comment of the struct above says so. All return OK or the number of an error.
extern "C" {

struct Context {
    Parallel parallel;
    int64_t threads, half;
    Threads team() const { return Threads{parallel, (int)threads}; }
};

struct PagedAttention {
    Context context;
    const void *queries, *keys, *values;
    const int32_t* blocks;
    const int64_t* positions;
    const float *bias, *sinks;
    void* out;
    int64_t batch, heads, kv_heads, d, stride, blocks_of_row, block_tokens, cache_blocks, bias_width, window, chunked;
    double scale, softcap;
};

int hybrid_paged_attention(const PagedAttention* a) {
    auto call = [&](auto kind) {
        using T = decltype(kind);
        return attention(
            Attention<T>{(const T*)a->queries, (const T*)a->keys, (const T*)a->values, a->blocks, a->positions, a->bias,
                         a->sinks, (T*)a->out, a->batch, a->heads, a->kv_heads, a->d, a->stride, a->blocks_of_row,
                         a->block_tokens, a->cache_blocks, a->bias_width, a->window, a->chunked, (float)a->scale,
                         (float)a->softcap},
            a->context.team());
    };
    return a->context.half ? call(bfloat16{}) : call(float{});
}

struct NormRows {
    Context context;
    const void *x, *delta, *weight;
    void *added, *normed;
    int64_t half_weight, rows, inner, outer_stride, inner_stride, width, in_float32;
    double eps;
};

int hybrid_norm(const NormRows* a) {
    auto call = [&](auto kind, auto weight_kind) {
        using T = decltype(kind);
        using W = decltype(weight_kind);
        return norm(
            Norm<T, W>{(const T*)a->x, (const T*)a->delta, (const W*)a->weight, (T*)a->added, (T*)a->normed, a->rows,
                       a->inner, a->outer_stride, a->inner_stride, a->width, (float)a->eps, a->in_float32 != 0},
            a->context.team());
    };
    if (!a->context.half) return call(float{}, float{});
    return a->half_weight ? call(bfloat16{}, bfloat16{}) : call(bfloat16{}, float{});
}

struct PackWeight {
    Context context;
    const float* weight;
    float* packed;
    int64_t inputs, outputs;
};

int hybrid_pack(const PackWeight* a) {
    return pack(Packing{a->weight, a->packed, a->inputs, a->outputs}, a->context.team());
}

struct Linear {
    Context context;
    const float *x, *weight, *bias;
    float* out;
    int64_t rows, inputs, outputs;
};

int hybrid_linear(const Linear* a) {
    return product(Product{a->x, a->weight, a->bias, a->out, a->rows, a->inputs, a->outputs}, a->context.team());
}

struct Dequantise {
    Context context;
    const void *codes, *scale_codes, *levels, *scale_levels, *scale_scales;
    void* out;
    int64_t weights, block, scale_block, narrow;
    double scale_offset;
};

int hybrid_dequantise(const Dequantise* a) {
    auto call = [&](auto kind) {
        using T = decltype(kind);
        return dequantise(FourBit<T>{(const uint8_t*)a->codes, (const uint8_t*)a->scale_codes, (const float*)a->levels,
                                     (const float*)a->scale_levels, (const float*)a->scale_scales, (T*)a->out,
                                     a->weights, a->block, a->scale_block, (float)a->scale_offset, a->narrow != 0},
                          a->context.team());
    };
    return a->context.half ? call(bfloat16{}) : call(float{});
}

struct Int8Linear {
    Context context;
    const void *x, *weight, *offset, *scale, *bias;
    void* out;
    int64_t rows, inputs, outputs;
};

int hybrid_int8_linear(const Int8Linear* a) {
    auto call = [&](auto kind) {
        using T = decltype(kind);
        return int8_product(
            Int8Product<T>{(const T*)a->x, (const int8_t*)a->weight, (const int32_t*)a->offset, (const float*)a->scale,
                           (const float*)a->bias, (T*)a->out, a->rows, a->inputs, a->outputs},
            a->context.team());
    };
    return a->context.half ? call(bfloat16{}) : call(float{});
}

struct SampleTokens {
    Context context;
    const float* logits;
    int64_t* integers;
    const double* floats;
    uint8_t* seen;
    float* bias;
    const int32_t* allowed;
    int64_t* tokens;
    float *logprobs, *sampling_logprobs;
    int64_t rows, vocabulary, integer_columns, float_columns;
};

int hybrid_sample(const SampleTokens* a) {
    return sample(Sampling{a->logits, a->integers, a->floats, a->seen, a->bias, a->allowed, a->tokens,
                           a->logprobs, a->sampling_logprobs, a->rows, a->vocabulary, a->integer_columns, a->float_columns},
                  a->context.team());
}
}

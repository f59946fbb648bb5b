// Step 3. C++ on one thread: the two halves of step 2 compiled.
//
// The change. Nothing in the mathematics: `graph=True` records `Value*` nodes as step02_autograd does, `graph=False`
// has the loops of step02_floats, in float32.
//
// Why it is faster. A multiplication is one instruction on a register; in Python it is a type test, a call and a new
// object on the heap. -O2 removes what the language adds; -O3 -march=native also uses this machine's vector registers
// where the order of a sum allows it. The graph stays slow even so: it writes a node of 32 bytes to memory for each
// operation, and reads it again in backward.
//
// All matrices are [n, d], row after row. lse is [n]. Run it: python -m flashtile_ladder step03_cpp

#include <cmath>
#include <cstdint>
#include <deque>
#include <vector>

// Value* graph nodes, as in step02_autograd.py -----------------------------------------------------------------------

struct Value {
    float data;
    float grad = 0.0f;
    Value* parents[2] = {nullptr, nullptr};
    float local[2] = {0.0f, 0.0f};  // d(this)/d(parent)
};

// Owns the values in the order in which they were made. A parent is always made before its child, so this order
// is already the one that backward needs: no sorting, as Python's version has to do.
struct Graph {
    std::deque<Value> values;  // a deque never moves its elements: pointers stay valid

    Value* leaf(float x) {
        values.push_back(Value{x});
        return &values.back();
    }
    Value* make(float x, Value* a, float da, Value* b = nullptr, float db = 0.0f) {
        values.push_back(Value{x, 0.0f, {a, b}, {da, db}});
        return &values.back();
    }
    Value* add(Value* a, Value* b) { return make(a->data + b->data, a, 1.0f, b, 1.0f); }
    Value* mul(Value* a, Value* b) { return make(a->data * b->data, a, b->data, b, a->data); }
    Value* div(Value* a, Value* b) {
        const float x = a->data / b->data;
        return make(x, a, 1.0f / b->data, b, -x / b->data);
    }
    Value* times(Value* a, float c) { return make(a->data * c, a, c); }
    Value* exp_minus(Value* a, float m) {
        const float e = std::exp(a->data - m);
        return make(e, a, e);
    }
    void backward() {
        for (auto x = values.rbegin(); x != values.rend(); ++x)
            for (int side = 0; side < 2; ++side)
                if (x->parents[side]) x->parents[side]->grad += x->grad * x->local[side];
    }
};

static std::vector<Value*> leaves(Graph& graph, const float* x, int64_t count) {
    std::vector<Value*> made(count);
    for (int64_t i = 0; i < count; ++i) made[i] = graph.leaf(x[i]);
    return made;
}

static void copy_gradients(const std::vector<Value*>& from, float* to) {
    for (size_t i = 0; i < from.size(); ++i) to[i] = from[i]->grad;
}

// Forward, and with dout also backward: the graph lives only as long as this call.
extern "C" void attention_graph(const float* q_, const float* k_, const float* v_, int64_t n, int64_t d, int causal,
                                float scale, float* out, float* lse, const float* dout, float* dq, float* dk,
                                float* dv) {
    Graph graph;
    const auto q = leaves(graph, q_, n * d), k = leaves(graph, k_, n * d), v = leaves(graph, v_, n * d);
    std::vector<Value*> o(n * d), s(n), p(n);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t visible = causal ? i + 1 : n;
        float m = -INFINITY;
        for (int64_t j = 0; j < visible; ++j) {  // s_ij = scale q_i . k_j
            Value* sum = graph.mul(q[i * d], k[j * d]);
            for (int64_t c = 1; c < d; ++c) sum = graph.add(sum, graph.mul(q[i * d + c], k[j * d + c]));
            s[j] = graph.times(sum, scale);
            m = std::fmax(m, s[j]->data);
        }
        Value* l = nullptr;
        for (int64_t j = 0; j < visible; ++j) {  // l_i = sum_j exp(s_ij - m_i)
            p[j] = graph.exp_minus(s[j], m);
            l = l ? graph.add(l, p[j]) : p[j];
        }
        for (int64_t j = 0; j < visible; ++j) p[j] = graph.div(p[j], l);
        for (int64_t c = 0; c < d; ++c) {  // o_i = sum_j p_ij v_j
            Value* sum = graph.mul(p[0], v[c]);
            for (int64_t j = 1; j < visible; ++j) sum = graph.add(sum, graph.mul(p[j], v[j * d + c]));
            o[i * d + c] = sum;
            out[i * d + c] = sum->data;
        }
        lse[i] = m + std::log(l->data);
    }
    if (!dout) return;
    for (int64_t i = 0; i < n * d; ++i) o[i]->grad = dout[i];
    graph.backward();
    copy_gradients(q, dq);
    copy_gradients(k, dk);
    copy_gradients(v, dv);
}

// Raw floats, as in step02_floats.py ---------------------------------------------------------------------------------

// The compiler keeps this sum in order, one element after the other: regrouping it into vector lanes would change the
// rounding, so it may only do so under -ffast-math. The loops over c below have no such sum and are vectorised.
static float dot(const float* a, const float* b, int64_t d) {
    float sum = 0.0f;
    for (int64_t c = 0; c < d; ++c) sum += a[c] * b[c];
    return sum;
}

extern "C" void attention_raw(const float* q, const float* k, const float* v, int64_t n, int64_t d, int causal,
                              float scale, float* out, float* lse) {
    std::vector<float> p(n);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t visible = causal ? i + 1 : n;
        float m = -INFINITY, l = 0.0f;
        for (int64_t j = 0; j < visible; ++j) {
            p[j] = scale * dot(q + i * d, k + j * d, d);
            m = std::fmax(m, p[j]);
        }
        for (int64_t j = 0; j < visible; ++j) l += p[j] = std::exp(p[j] - m);
        float* o = out + i * d;
        for (int64_t c = 0; c < d; ++c) o[c] = 0.0f;
        for (int64_t j = 0; j < visible; ++j) {
            const float weight = p[j] / l;
            for (int64_t c = 0; c < d; ++c) o[c] += weight * v[j * d + c];
        }
        lse[i] = m + std::log(l);
    }
}

// dq, dk and dv arrive as zeros.
extern "C" void backward_raw(const float* q, const float* k, const float* v, const float* out, const float* lse,
                             const float* dout, int64_t n, int64_t d, int causal, float scale, float* dq, float* dk,
                             float* dv) {
    for (int64_t i = 0; i < n; ++i) {
        const float delta = dot(dout + i * d, out + i * d, d);
        for (int64_t j = 0; j < (causal ? i + 1 : n); ++j) {
            const float p = std::exp(scale * dot(q + i * d, k + j * d, d) - lse[i]);
            const float ds = scale * p * (dot(dout + i * d, v + j * d, d) - delta);
            for (int64_t c = 0; c < d; ++c) {
                dv[j * d + c] += p * dout[i * d + c];
                dq[i * d + c] += ds * k[j * d + c];
                dk[j * d + c] += ds * q[i * d + c];
            }
        }
    }
}

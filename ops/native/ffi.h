// A kernel's entry: the arrays and attributes that XLA passes, read through its C interface. With XLA's C++ headers each
// kernel would take two to three seconds longer to compile, and kernels are compiled while somebody waits.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace quire {

// Bytes of an element; 0 for types that no kernel takes: tokens, and those of less than a byte.
inline int64_t element_bytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_C128:
      return 16;
    default:
      return 0;
  }
}

// A set of element types.
struct Types {
  uint64_t set;

  constexpr Types(XLA_FFI_DataType type) : set(uint64_t{1} << type) {}
  constexpr explicit Types(uint64_t set) : set(set) {}
  constexpr Types operator|(Types other) const { return Types(set | other.set); }
  bool has(XLA_FFI_DataType type) const { return element_bytes(type) && (set >> type & 1); }
};

namespace dtype {
constexpr auto PRED = XLA_FFI_DataType_PRED, F32 = XLA_FFI_DataType_F32, F16 = XLA_FFI_DataType_F16,
               BF16 = XLA_FFI_DataType_BF16, S8 = XLA_FFI_DataType_S8, S32 = XLA_FFI_DataType_S32,
               U8 = XLA_FFI_DataType_U8, U16 = XLA_FFI_DataType_U16, U32 = XLA_FFI_DataType_U32;
constexpr Types ANY(~uint64_t{0}), FLOATS = Types(F32) | Types(BF16);
}

// XLA's own threads.
class Pool {
 public:
  explicit Pool(const XLA_FFI_CallFrame* frame) : api(frame->api), ctx(frame->ctx) {}

  int64_t num_threads() const {
    int64_t threads = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = ctx, args.num_threads = &threads;
    forget(api->XLA_FFI_ThreadPool_NumThreads(&args));
    return threads;
  }

  // Without a pool the caller does the work.
  template <typename Task>
  void Schedule(Task task) {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = ctx, args.data = new Task(std::move(task));
    args.task = [](void* data) {
      Task* own = static_cast<Task*>(data);
      (*own)();
      delete own;
    };
    if (forget(api->XLA_FFI_ThreadPool_Schedule(&args))) args.task(args.data);
  }

 private:
  bool forget(XLA_FFI_Error* error) const {
    if (!error) return false;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    api->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* ctx;
};

// An array in XLA's memory.
class Buffer {
 public:
  explicit Buffer(const void* from) : b(static_cast<const XLA_FFI_Buffer*>(from)), at(static_cast<char*>(b->data)) {}

  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(at);
  }
  template <typename T>
  T* given() const {  // null where the array is empty
    return size() ? data<T>() : nullptr;
  }
  XLA_FFI_DataType type() const { return b->dtype; }
  bool wide() const { return b->dtype == dtype::F32; }  // of FLOATS: not bfloat16
  int64_t dim(int64_t axis) const { return b->dims[first + axis]; }
  int64_t last() const { return b->dims[b->rank - 1]; }
  int64_t size() const {
    int64_t n = 1;
    for (int64_t axis = first; axis < b->rank; ++axis) n *= b->dims[axis];
    return n;
  }
  int64_t bytes() const { return size() * item(); }

  // The part at index `i` of the first axis.
  Buffer part(int64_t i) const {
    Buffer p = *this;
    ++p.first;
    p.at += i * p.size() * item();
    return p;
  }

 private:
  int64_t item() const { return element_bytes(type()); }

  const XLA_FFI_Buffer* b;
  char* at;
  int64_t first = 0;  // the axes before it are those of what this is a part of
};

inline int64_t rows_in(Buffer x) { return x.size() / x.last(); }

// Rows up to the last that is not all zeros: a step's padding is zeros, whose products are known.
inline int64_t rows_used(Buffer x) {
  int64_t T = rows_in(x), size = x.last() * (x.wide() ? 2 : 1);
  auto empty = [&](int64_t row) {
    const uint16_t* at = x.data<uint16_t>() + row * size;
    uint16_t any = 0;
    for (int64_t i = 0; i < size; ++i) any |= at[i];
    return !any;
  };
  while (T > 0 && empty(T - 1)) --T;
  return T;
}

// What a kernel takes: its arrays' types, its attributes by name, in alphabetical order, and the types of its results.
struct Signature {
  std::initializer_list<Types> arrays;
  std::initializer_list<const char*> attributes;
  Types results = dtype::ANY;
};

// One call.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame* frame) : frame(frame) {}

  Pool pool() const { return Pool(frame); }
  int64_t arrays() const { return frame->args.size; }
  Buffer array(int64_t i) const { return Buffer(frame->args.args[i]); }
  int64_t results() const { return frame->rets.size; }
  Buffer result(int64_t i = 0) const { return Buffer(frame->rets.rets[i]); }

  template <typename T>
  T attribute(const char* name) const {
    T value{};
    static_assert(sizeof(T) == 4);
    for (int64_t i = 0; i < frame->attrs.size; ++i)
      if (named(i, name)) std::memcpy(&value, static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[i])->value, 4);
    return value;
  }

  bool fits(const Signature& s) const {
    const XLA_FFI_Args& args = frame->args;
    const XLA_FFI_Attrs& attrs = frame->attrs;
    bool same = args.size == static_cast<int64_t>(s.arrays.size()) && frame->rets.size > 0 &&
                attrs.size == static_cast<int64_t>(s.attributes.size());
    for (int64_t i = 0; same && i < args.size; ++i) same = s.arrays.begin()[i].has(array(i).type());
    for (int64_t i = 0; same && i < results(); ++i) same = s.results.has(result(i).type());
    for (int64_t i = 0; same && i < attrs.size; ++i) {
      same = attrs.types[i] == XLA_FFI_AttrType_SCALAR && named(i, s.attributes.begin()[i]);
      if (same) same = (Types(dtype::F32) | Types(dtype::S32)).has(static_cast<XLA_FFI_Scalar*>(attrs.attrs[i])->dtype);
    }
    return same;
  }

 private:
  bool named(int64_t i, const char* name) const {
    const XLA_FFI_ByteSpan& span = *frame->attrs.names[i];
    return span.len == std::strlen(name) && !std::memcmp(span.ptr, name, span.len);
  }

  const XLA_FFI_CallFrame* frame;
};

inline XLA_FFI_Error* refuse(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message, args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Answers XLA, which first asks for the version of its interface. `run` returns an error's text, or null.
template <typename Run>
XLA_FFI_Error* enter(XLA_FFI_CallFrame* frame, const Signature& signature, const Run& run) {
  if (auto* extension = frame->extension_start; extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata& about = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    about.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    about.traits = 0;
    about.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  Call call(frame);
  const char* wrong = frame->stage != XLA_FFI_ExecutionStage_EXECUTE ? "a kernel can only be executed"
                      : call.fits(signature)                         ? run(call)
                                                                     : "a kernel is called with other arrays";
  return wrong ? refuse(frame, wrong) : nullptr;
}

// The one symbol of a kernel's library.
#define QUIRE_KERNEL(run, ...)                                                                                        \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* quire_kernel(XLA_FFI_CallFrame* frame) {            \
    return enter(frame, __VA_ARGS__, run);                                                                             \
  }

}  // namespace quire

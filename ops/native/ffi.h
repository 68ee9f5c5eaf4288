// The entry of a kernel: arrays, attributes and thread pool that XLA passes, read through the C interface of its FFI.
// XLA's C++ headers would add two to three seconds to the compilation of each kernel, which delays the start of a
// server.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace quire {

// Bytes of an element; 0 for types that no kernel supports: tokens and sub-byte types.
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
  constexpr Types operator|(Types types) const { return Types(set | types.set); }
  bool contains(XLA_FFI_DataType type) const { return element_bytes(type) && (set >> type & 1); }
};

namespace dtype {
constexpr auto PRED = XLA_FFI_DataType_PRED, F32 = XLA_FFI_DataType_F32, F16 = XLA_FFI_DataType_F16,
               BF16 = XLA_FFI_DataType_BF16, S8 = XLA_FFI_DataType_S8, S32 = XLA_FFI_DataType_S32,
               U8 = XLA_FFI_DataType_U8, U16 = XLA_FFI_DataType_U16, U32 = XLA_FFI_DataType_U32;
constexpr Types ANY(~uint64_t{0}), FLOATS = Types(F32) | Types(BF16);
}

// XLA's thread pool of a call.
class Pool {
 public:
  explicit Pool(const XLA_FFI_CallFrame* frame) : api(frame->api), ctx(frame->ctx) {}

  int64_t num_threads() const {
    int64_t threads = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = ctx;
    args.num_threads = &threads;
    consume_error(api->XLA_FFI_ThreadPool_NumThreads(&args));
    return threads;
  }

  // Runs the task on the pool, or on the caller if there is no pool.
  template <typename Task>
  void Schedule(Task task) {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = ctx;
    args.data = new Task(std::move(task));
    args.task = [](void* data) {
      Task* task = static_cast<Task*>(data);
      (*task)();
      delete task;
    };
    if (consume_error(api->XLA_FFI_ThreadPool_Schedule(&args))) args.task(args.data);
  }

 private:
  // Destroys the error, if any, and returns whether there was one.
  bool consume_error(XLA_FFI_Error* error) const {
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
  explicit Buffer(const void* buffer)
      : b(static_cast<const XLA_FFI_Buffer*>(buffer)), address(static_cast<char*>(b->data)) {}

  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(address);
  }
  template <typename T>
  T* data_or_null() const {  // null if the array is empty
    return size() ? data<T>() : nullptr;
  }
  XLA_FFI_DataType type() const { return b->dtype; }
  bool is_float32() const { return b->dtype == dtype::F32; }  // else bfloat16, if it is one of FLOATS
  int64_t dim(int64_t axis) const { return b->dims[first_axis + axis]; }
  int64_t last_dim() const { return b->dims[b->rank - 1]; }
  int64_t size() const {
    int64_t n = 1;
    for (int64_t axis = first_axis; axis < b->rank; ++axis) n *= b->dims[axis];
    return n;
  }
  int64_t bytes() const { return size() * element_size(); }

  // The array at index `i` of the first axis.
  Buffer slice(int64_t i) const {
    Buffer s = *this;
    ++s.first_axis;
    s.address += i * s.size() * element_size();
    return s;
  }

 private:
  int64_t element_size() const { return element_bytes(type()); }

  const XLA_FFI_Buffer* b;
  char* address;
  int64_t first_axis = 0;  // the number of axes that `slice` removed
};

inline int64_t num_rows(Buffer x) { return x.size() / x.last_dim(); }

// The number of rows without all-zero rows at the end: a step is padded with zeros, whose results are known.
inline int64_t rows_used(Buffer x) {
  int64_t T = num_rows(x);
  int64_t size = x.last_dim() * (x.is_float32() ? 2 : 1);  // of a row, in 16-bit words
  auto is_zero = [&](int64_t row) {
    const uint16_t* words = x.data<uint16_t>() + row * size;
    uint16_t bits = 0;
    for (int64_t i = 0; i < size; ++i) bits |= words[i];
    return !bits;
  };
  while (T > 0 && is_zero(T - 1)) --T;
  return T;
}

// A kernel's signature: types of its arrays, names of its attributes in alphabetical order, and types of its results.
struct Signature {
  std::initializer_list<Types> arrays;
  std::initializer_list<const char*> attributes;
  Types results = dtype::ANY;
};

// Arrays, attributes and results of one call.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame* frame) : frame(frame) {}

  Pool pool() const { return Pool(frame); }
  int64_t num_arrays() const { return frame->args.size; }
  Buffer array(int64_t i) const { return Buffer(frame->args.args[i]); }
  int64_t num_results() const { return frame->rets.size; }
  Buffer result(int64_t i = 0) const { return Buffer(frame->rets.rets[i]); }

  template <typename T>
  T attribute(const char* name) const {
    T value{};
    static_assert(sizeof(T) == 4);
    for (int64_t i = 0; i < frame->attrs.size; ++i)
      if (has_name(i, name)) std::memcpy(&value, static_cast<XLA_FFI_Scalar*>(frame->attrs.attrs[i])->value, 4);
    return value;
  }

  bool matches(const Signature& s) const {
    const XLA_FFI_Args& args = frame->args;
    const XLA_FFI_Attrs& attrs = frame->attrs;
    bool is_match = args.size == static_cast<int64_t>(s.arrays.size()) && frame->rets.size > 0 &&
                attrs.size == static_cast<int64_t>(s.attributes.size());
    for (int64_t i = 0; is_match && i < args.size; ++i) is_match = s.arrays.begin()[i].contains(array(i).type());
    for (int64_t i = 0; is_match && i < num_results(); ++i) is_match = s.results.contains(result(i).type());
    for (int64_t i = 0; is_match && i < attrs.size; ++i) {
      is_match = attrs.types[i] == XLA_FFI_AttrType_SCALAR && has_name(i, s.attributes.begin()[i]);
      if (is_match)
        is_match =
            (Types(dtype::F32) | Types(dtype::S32)).contains(static_cast<XLA_FFI_Scalar*>(attrs.attrs[i])->dtype);
    }
    return is_match;
  }

 private:
  bool has_name(int64_t i, const char* name) const {
    const XLA_FFI_ByteSpan& span = *frame->attrs.names[i];
    return span.len == std::strlen(name) && !std::memcmp(span.ptr, name, span.len);
  }

  const XLA_FFI_CallFrame* frame;
};

inline XLA_FFI_Error* create_error(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Handles a call of XLA, of which the first queries the version of the interface. `run` returns an error message or
// null.
template <typename Run>
XLA_FFI_Error* enter(XLA_FFI_CallFrame* frame, const Signature& signature, const Run& run) {
  if (auto* extension = frame->extension_start; extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(extension)->metadata;
    metadata.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    metadata.traits = 0;
    metadata.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  Call call(frame);
  const char* error = frame->stage != XLA_FFI_ExecutionStage_EXECUTE ? "a kernel can only be executed"
                      : call.matches(signature)                      ? run(call)
                                                                     : "a kernel is called with other arrays";
  return error ? create_error(frame, error) : nullptr;
}

// Defines the entry symbol of a kernel's library.
#define QUIRE_KERNEL(run, ...)                                                                                         \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* quire_kernel(XLA_FFI_CallFrame* frame) {            \
    return enter(frame, __VA_ARGS__, run);                                                                             \
  }

}  // namespace quire

// The kernel of zeros, called as XLA calls it, for every type: it clears its result and nothing else. The result lies
// inside larger memory at a random offset and of a random size, so that whole system pages are released.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "blank.cc"

struct Type {
  XLA_FFI_DataType type;
  int64_t bytes;  // 0: unsupported
};
const Type TYPES[] = {
    {XLA_FFI_DataType_PRED, 1},           {XLA_FFI_DataType_S8, 1},         {XLA_FFI_DataType_U8, 1},
    {XLA_FFI_DataType_F8E5M2, 1},         {XLA_FFI_DataType_F8E3M4, 1},     {XLA_FFI_DataType_F8E4M3, 1},
    {XLA_FFI_DataType_F8E4M3FN, 1},       {XLA_FFI_DataType_F8E5M2FNUZ, 1}, {XLA_FFI_DataType_F8E4M3FNUZ, 1},
    {XLA_FFI_DataType_F8E4M3B11FNUZ, 1},  {XLA_FFI_DataType_F8E8M0FNU, 1},  {XLA_FFI_DataType_S16, 2},
    {XLA_FFI_DataType_U16, 2},            {XLA_FFI_DataType_F16, 2},        {XLA_FFI_DataType_BF16, 2},
    {XLA_FFI_DataType_S32, 4},            {XLA_FFI_DataType_U32, 4},        {XLA_FFI_DataType_F32, 4},
    {XLA_FFI_DataType_S64, 8},            {XLA_FFI_DataType_U64, 8},        {XLA_FFI_DataType_F64, 8},
    {XLA_FFI_DataType_C64, 8},            {XLA_FFI_DataType_C128, 16},      {XLA_FFI_DataType_S4, 0},
    {XLA_FFI_DataType_U4, 0},             {XLA_FFI_DataType_S2, 0},         {XLA_FFI_DataType_U2, 0},
    {XLA_FFI_DataType_S1, 0},             {XLA_FFI_DataType_U1, 0},         {XLA_FFI_DataType_F4E2M1FN, 0},
    {XLA_FFI_DataType_TOKEN, 0},          {XLA_FFI_DataType_INVALID, 0},
};
const int64_t PAGE = 4096, AROUND = 5 * PAGE * 16;  // more than four times the bytes of the largest type

XLA_FFI_Error* keep_message(XLA_FFI_Error_Create_Args* args) {
  return reinterpret_cast<XLA_FFI_Error*>(const_cast<char*>(args->message));
}

bool is_rejected(const Type& type_case, char* at, int64_t count) {
  XLA_FFI_Api api{};
  api.XLA_FFI_Error_Create = keep_message;
  XLA_FFI_Buffer buffer{};
  buffer.dtype = type_case.type, buffer.data = at, buffer.rank = 1, buffer.dims = &count;
  void* buffers[] = {&buffer};
  XLA_FFI_RetType type = XLA_FFI_RetType_BUFFER;
  XLA_FFI_CallFrame frame{};
  frame.api = &api, frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.rets.size = 1, frame.rets.types = &type, frame.rets.rets = buffers;
  return quire::quire_kernel(&frame) != nullptr;
}

int main(int argc, char** argv) {
  std::mt19937 random(1);
  int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  for (int round = 0; round < rounds; ++round)
    for (const Type& type_case : TYPES) {
      int64_t count = 1 + random() % (4 * PAGE), size = count * type_case.bytes;
      int64_t from = AROUND + random() % PAGE / 16 * 16;
      std::vector<char> memory(from + size + AROUND, 7);
      if (is_rejected(type_case, memory.data() + from, count) != (type_case.bytes == 0))
        return std::printf("type %d is rejected or accepted wrongly\n", type_case.type);
      for (int64_t i = 0; i < static_cast<int64_t>(memory.size()); ++i)
        if (memory[i] != (i < from || i >= from + size ? 7 : 0))
          return std::printf("type %d: byte %ld of %ld is %d\n", type_case.type, static_cast<long>(i - from),
                             static_cast<long>(size), memory[i]);
    }
  return 0;
}

#include "fibre.h"

#include <stdint.h>
#include <string.h>

// What a called function must keep is pushed; the rest the compiler has saved, since it sees a call.
#if defined(__x86_64__)
asm(R"(
    .text
    .globl model_switch
    .type model_switch, @function
model_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size model_switch, .-model_switch
    .section .note.GNU-stack,"",@progbits
    .text
)");
constexpr size_t kSaved = 8;     // words, with the return address and one to align
constexpr size_t kReturnAt = 6;  // of the words
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl model_switch
    .type model_switch, %function
model_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size model_switch, .-model_switch
    .section .note.GNU-stack,"",%progbits
    .text
)");
constexpr size_t kSaved = 20;
constexpr size_t kReturnAt = 11;
#else
#error "the model's fibres know x86-64 and aarch64"
#endif

namespace model {

void* new_fibre(unsigned char* top, void (*run)()) {
  uint64_t frame[kSaved] = {};
  frame[kReturnAt] = reinterpret_cast<uint64_t>(run);
  unsigned char* const at = top - sizeof frame;
  memcpy(at, frame, sizeof frame);
  return at;
}

}  // namespace model

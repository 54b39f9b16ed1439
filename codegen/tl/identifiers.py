"""Which names and numbers of a TL text may reach C++."""

from __future__ import annotations

import re

MAX_NAME = 64  #: characters of a name
MAX_INT = 2**31 - 1
MAX_NUMBER = 3.4028234663852886e38  #: the largest f32

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = """
    alignas alignof asm auto bool break case catch char char8_t char16_t char32_t class concept
    const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern float friend goto
    if inline int long mutable namespace noexcept nullptr operator private protected public
    register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw try typedef typeid typename
    union unsigned using virtual void volatile wchar_t while
    bitand bitor and_eq or_eq xor_eq not_eq compl
    NULL INFINITY NAN assert defined errno
    """
#: words of C++ and CUDA, and macros of the headers a kernel includes
_CXX = frozenset(_WORDS.split())
#: prefixes of macros: CUTE_HOST_DEVICE, CUTLASS_PRAGMA_UNROLL, ...
_MACROS = re.compile(
    r"(CUTE|CUTLASS|CUDA|CUDART|NVRTC|CCCL|LIBCUDACXX|INT|UINT|FLT|DBL)_[A-Z0-9_]*"
)


def name_fault(text: str) -> str | None:
    """Return why `text` cannot be a name in a program and in C++, or None."""
    if len(text) > MAX_NAME:
        return f"it has {len(text)} characters, at most {MAX_NAME} are read"
    if not _IDENTIFIER.fullmatch(text):
        return "only ASCII letters, digits and `_` can be in one"
    if text in _CXX:
        return "it is a word of C++"
    if "__" in text or re.match(r"_[A-Z]", text):
        return "such underscores are the compiler's own"
    if _MACROS.fullmatch(text):
        return "it is a macro of the headers that a kernel includes"
    return None

"""TL text to cubin: the language front end, the CuTe translator and the NVRTC compiler."""

"""What shows that schedulers agree: with the specification, with vLLM, with each other."""

"""Names of the settings that hold for a whole process. No torch here."""

NAMES = ("cudnn_benchmark", "omp_num_threads")

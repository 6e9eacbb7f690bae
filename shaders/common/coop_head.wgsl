// Halves and cooperative matrices.
enable f16;
enable wgpu_cooperative_matrix;

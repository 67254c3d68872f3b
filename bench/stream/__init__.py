"""What a request and a token cost each process of the mesh, with mock engines; `headrace bench stream`."""

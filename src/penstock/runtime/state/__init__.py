"""What a stage keeps besides its parameters, and whose memory that is: buffers, attributes, random numbers."""

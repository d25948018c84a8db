"""What every key received in attention: statistics of the columns of a map that is never made."""

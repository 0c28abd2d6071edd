-- Removes entries that nobody can read or answer.
-- KEYS: streams.
-- ARGV: group; then for each entry: stream number, entry id.
for at = 2, #ARGV, 2 do
  redis.call('XACK', KEYS[tonumber(ARGV[at])], ARGV[1], ARGV[at + 1])
  redis.call('XDEL', KEYS[tonumber(ARGV[at])], ARGV[at + 1])
end

-- Deletes idle consumers that hold no entries: workers that died long ago.
-- KEYS: streams.
-- ARGV: group, idle time (ms).
for _, stream in ipairs(KEYS) do
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, ARGV[1])) do
    local of = {}
    for at = 1, #info, 2 do of[info[at]] = info[at + 1] end
    if of.pending == 0 and of.idle > tonumber(ARGV[2]) then redis.call('XGROUP', 'DELCONSUMER', stream, ARGV[1], of.name) end
  end
end

{{/* The command line of `medusa-gateway serve`; gateway/commands/serve.py defines the flags. */}}
{{- define "medusa-gateway.serveArgs" -}}
{{ include "medusa-gateway.ownArgs" . }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "medusa-gateway.ownArgs" -}}
- serve
- {{ printf "--host=%s" .Values.listenAddress | quote }}
- --port=8080
# /admin and /metrics have a port of their own, which no Ingress leads to.
- {{ printf "--admin-host=%s" .Values.listenAddress | quote }}
- --admin-port=8081
{{- if eq .Values.auth.mode "none" }}
- --insecure-no-auth
{{- else }}
- {{ printf "--api-keys=/etc/medusa-gateway/keys/%s" (include "medusa-gateway.keysFile" .) | quote }}
{{- end }}
{{- range .Values.auth.corsOrigins }}
- {{ printf "--cors-origin=%s" . | quote }}
{{- end }}
{{- include "medusa-gateway.modelArgs" . }}
{{- if not (include "medusa-gateway.backendsConfigMap" .) }}
{{- with .Values.model }}
{{- with .servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
- --dtype={{ .dtype }}
{{- with .maxLength }}
- --max-model-len={{ . | int64 }}
{{- end }}
{{- end }}
- --device={{ ternary "cuda" "cpu" .Values.gpu.enabled }}
{{- end }}
{{- with .Values.limits }}
{{- with .maxRunning }}
- --max-running={{ . | int64 }}
{{- end }}
- --max-queue={{ .maxQueue | int64 }}
{{- with .kvTokens }}
- --kv-tokens={{ . | int64 }}
{{- end }}
- --default-max-tokens={{ .defaultMaxTokens | int64 }}
{{- with .deadlineSeconds }}
- --deadline={{ . }}
{{- end }}
- --max-body-bytes={{ .maxBodyBytes | int64 }}
{{- end }}
- --log-format={{ .Values.telemetry.logFormat }}
- --log-level={{ .Values.telemetry.logLevel }}
- --policy=/etc/medusa-gateway/policy/policy.yaml
- --drain-timeout={{ .Values.drain.timeoutSeconds }}
{{- end }}
